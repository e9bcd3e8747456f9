// The style sheet, script and chart library that Page writes into each page.
#include "pages/html_assets.hpp"

#include "pages/html_page.hpp"

#ifdef ECHOLINE_CHART_JS
// Embeds Chart.js in the program, from the path that the build defines. The symbols mark its start and its end.
__asm__(
    ".pushsection .rodata\n"
    ".global echoline_chart_js\n.global echoline_chart_js_end\n"
    "echoline_chart_js:\n.incbin \"" ECHOLINE_CHART_JS
    "\"\necholine_chart_js_end:\n.byte 0\n"
    ".popsection\n");
extern "C" const char echoline_chart_js[];
extern "C" const char echoline_chart_js_end[];
#endif

namespace echoline::pages {
namespace {

[[maybe_unused]] constexpr std::string_view kChartLicence =
    R"(Chart.js, https://www.chartjs.org, Copyright (c) 2014-2022 Chart.js Contributors
@kurkle/color, which it contains, https://github.com/kurkle/color, Copyright (c) Jukka Kurkela

The MIT License (MIT)

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.)";

constexpr std::string_view kStyle = R"(:root {
  color-scheme: light dark;
  --back: #ffffff; --text: #1f2328; --soft: #59636e; --line: #d5dae0; --band: #f5f7f9; --link: #0a58ca;
  --c0: #1b6ca8; --c1: #c0392b; --c2: #1e8449; --c3: #8e44ad;
  --c4: #b9770e; --c5: #117a65; --c6: #d81b60; --c7: #5d6d7e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14181d; --text: #e3e7ec; --soft: #9aa5b1; --line: #353d47; --band: #1c2229; --link: #7ab7ff;
    --c0: #5dade2; --c1: #ec7063; --c2: #58d68d; --c3: #bb8fce;
    --c4: #f5b041; --c5: #48c9b0; --c6: #ff7aa8; --c7: #aeb6bf;
  }
}
body { margin: 2rem auto; max-width: 84rem; padding: 0 1.2rem; background: var(--back); color: var(--text);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
a { color: var(--link); } td a { white-space: nowrap; }
p, dd, td { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); gap: .4rem 1.5rem; }
dl div { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 1px solid var(--line); }
dt { color: var(--soft); } dd { margin: 0; text-align: right; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.2rem;
         margin: 1rem 0; }
figure { margin: 0; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: .4rem; overflow-wrap: anywhere; }
.canvas { position: relative; height: 18rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; } td.n, th.n { text-align: right; white-space: nowrap; }
tbody tr:hover { background: var(--band); }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .grid { stroke: var(--line); }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; } pre { white-space: pre-wrap; }
)";

constexpr std::string_view kScript = R"((() => {
  'use strict';
  const plots = JSON.parse(document.getElementById('plots').textContent);
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = v => typeof v === 'number' ? String(Number(v.toPrecision(4))) : v;
  // A plugin of Chart.js that draws the interval of each point as an error bar.
  const intervals = {
    id: 'intervals',
    afterDatasetsDraw(chart) {
      const { ctx, scales: { y } } = chart;
      chart.data.datasets.forEach((set, i) => {
        const meta = chart.getDatasetMeta(i);
        if (meta.hidden || !chart.isDatasetVisible(i)) return;
        ctx.save();
        ctx.strokeStyle = set.borderColor;
        ctx.lineWidth = 1.2;
        meta.data.forEach((point, k) => {
          const raw = set.data[k];
          if (raw.low === undefined) return;
          const top = y.getPixelForValue(raw.high), bottom = y.getPixelForValue(raw.low);
          ctx.beginPath();
          ctx.moveTo(point.x, top); ctx.lineTo(point.x, bottom);
          ctx.moveTo(point.x - 4, top); ctx.lineTo(point.x + 4, top);
          ctx.moveTo(point.x - 4, bottom); ctx.lineTo(point.x + 4, bottom);
          ctx.stroke();
        });
        ctx.restore();
      });
    },
  };
  const axis = (title, more) => ({
    title: { display: title !== '', text: title, color: colour('--soft') },
    grid: { color: colour('--line'), borderColor: colour('--line') },
    ticks: { color: colour('--soft') },
    ...more,
  });
  const draw = (plot, i) => {
    // Above 30 points, lines have no markers and the x axis ends at the data.
    const hasManyPoints = plot.series.some(s => s.points.length > 30);
    const yValues = plot.series.flatMap(s => s.points).flatMap(p => p.low === undefined ? [p.y] : [p.low, p.high, p.y]);
    const yLow = Math.min(...yValues), yHigh = Math.max(...yValues);
    // The y axis starts at 0 if no value is negative and the values extend over more than half of that axis. Equal
    // values also get an axis from 0, because one from their value would have no length.
    const startsAtZero = yLow >= 0 && (yLow < yHigh / 2 || yLow === yHigh);
    const yMin = startsAtZero ? 0 : yLow;
    return new Chart(document.getElementById('plot' + i), {
      type: 'line',
      plugins: [intervals],
      data: {
        datasets: plot.series.map((s, k) => ({
          label: s.name,
          borderColor: colour('--c' + k % 8), backgroundColor: colour('--c' + k % 8),
          pointBorderColor: colour('--c' + k % 8), pointBackgroundColor: colour('--c' + k % 8),
          data: s.points.map(p => ({ ...p, x: plot.categories ? plot.categories[p.x] : p.x })),
          showLine: s.joined, borderWidth: 1.6, tension: 0,
          pointRadius: s.joined ? (hasManyPoints ? 0 : 3) : 4.5, pointHitRadius: 8, pointHoverRadius: 6,
        })),
      },
      options: {
        animation: false, maintainAspectRatio: false, responsive: true,
        interaction: { mode: 'nearest', intersect: false },
        scales: {
          x: axis(plot.x, plot.categories
              ? { type: 'category', labels: plot.categories, offset: true }
              : { type: 'linear', ...(hasManyPoints ? { bounds: 'data' } : { grace: '3%' }) }),
          y: axis(plot.y, { suggestedMin: yMin, suggestedMax: yHigh }),
        },
        plugins: {
          legend: { display: plot.series.length > 1, position: 'bottom',
                    labels: { boxWidth: 14, boxHeight: 2, color: colour('--text') } },
          tooltip: {
            callbacks: {
              title: items => items.map(item => (plot.x ? plot.x + ' ' : '') + short(item.raw.x)),
              label: item => {
                const p = item.raw, name = item.dataset.label;
                const interval = p.low === undefined ? '' : ' (' + short(p.low) + ' to ' + short(p.high) + ')';
                return (name ? name + ': ' : '') + short(p.y) + interval;
              },
              afterLabel: item => item.raw.note || '',
            },
          },
        },
        onClick: (event, points, chart) => {
          if (points.length === 0) return;
          const { datasetIndex, index } = points[0];
          const link = chart.data.datasets[datasetIndex].data[index].link;
          if (link) location.href = link;
        },
      },
    });
  };
  let charts = plots.map(draw);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    charts.forEach(chart => chart.destroy());
    charts = plots.map(draw);
  });
})();
)";

}  // namespace

std::string_view page_style() { return kStyle; }
std::string_view page_script() { return kScript; }

ChartLibrary built_in_charts() {
#ifdef ECHOLINE_CHART_JS
  return {{echoline_chart_js, static_cast<std::size_t>(echoline_chart_js_end - echoline_chart_js)}, kChartLicence};
#else
  return {};
#endif
}

}  // namespace echoline::pages
