// Draws plots as SVG, for programs built without Chart.js.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "pages/html_page.hpp"

namespace echoline::pages {
namespace {

constexpr double kWidth = 560, kHeight = 260, kLeft = 64, kRight = 14, kTop = 12, kAxis = 40, kLegendRow = 18;
constexpr int kTicks = 5;

struct Span {
  double low = 0, high = 1;
};

// A range slightly wider than the values; begins at 0 if that is near.
Span span_of(double low, double high) {
  if (!(low < high)) return {low - (low == 0 ? 1 : std::abs(low) / 2), high + (high == 0 ? 1 : std::abs(high) / 2)};
  if (low >= 0 && low < high / 2) return {0, high * 1.05};
  return {low - (high - low) * 0.05, high + (high - low) * 0.05};
}

// 1, 2 or 5 times a power of ten, about `span` / kTicks.
double tick_of(double span) {
  const double power = std::pow(10, std::floor(std::log10(span / kTicks)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (span / (factor * power) <= kTicks + 1) return factor * power;
  return 10 * power;
}

std::string text_at(double x, double y, std::string_view anchor, std::string_view text) {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}'>{}</text>", x, y, anchor,
                     escape_html(printable(text, 200)));
}

std::string tip(const Plot& plot, const PlotSeries& series, const PlotPoint& p) {
  const auto category = static_cast<std::size_t>(std::max(0.0, p.x));
  std::string text = series.name.empty() ? "" : series.name + ": ";
  text += fmt::format("{} {}, {:.4g}", plot.x_title,
                      category < plot.categories.size() ? plot.categories[category] : fmt::format("{:.4g}", p.x), p.y);
  if (p.low && p.high) text += fmt::format(" ({:.4g} to {:.4g})", *p.low, *p.high);
  if (!p.note.empty()) text += "; " + p.note;
  return fmt::format("<title>{}</title>", escape_html(printable(text, 1000)));
}

}  // namespace

std::string plot_svg(const Plot& plot) {
  double x_low = INFINITY, x_high = -INFINITY, y_low = INFINITY, y_high = -INFINITY;
  for (const PlotSeries& series : plot.series)
    for (const PlotPoint& p : series.points) {
      x_low = std::min(x_low, p.x), x_high = std::max(x_high, p.x);
      y_low = std::min({y_low, p.y, p.low.value_or(p.y)}), y_high = std::max({y_high, p.y, p.high.value_or(p.y)});
    }
  if (!(x_low <= x_high) || !std::isfinite(y_high - y_low) || !std::isfinite(x_high - x_low)) return "";
  const Span ys = span_of(y_low, y_high);
  const Span xs = plot.categories.empty() ? (x_low < x_high ? Span{x_low, x_high} : span_of(x_low, x_high))
                                          : Span{-0.5, static_cast<double>(plot.categories.size()) - 0.5};
  const double bottom = kHeight - kAxis, width = kWidth - kLeft - kRight;
  const auto px = [&](double x) { return kLeft + (x - xs.low) / (xs.high - xs.low) * width; };
  const auto py = [&](double y) { return bottom - (y - ys.low) / (ys.high - ys.low) * (bottom - kTop); };
  const bool named = plot.series.size() > 1;
  const double height = kHeight + (named ? kLegendRow * static_cast<double>(plot.series.size()) : 0);
  std::string out = fmt::format("<svg viewBox='0 0 {} {}' role='img'>\n", kWidth, height);
  const double y_tick = tick_of(ys.high - ys.low);
  for (int i = 0; i <= 2 * kTicks; ++i) {
    const double y = (std::ceil(ys.low / y_tick) + i) * y_tick;
    if (y > ys.high) break;
    out +=
        fmt::format("<line class='grid' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>", kLeft, kLeft + width, py(y), py(y));
    out += text_at(kLeft - 6, py(y) + 4, "end", fmt::format("{:.4g}", std::abs(y) < y_tick / 1e6 ? 0 : y));
  }
  if (plot.categories.empty()) {
    const double x_tick = tick_of(xs.high - xs.low);
    for (int i = 0; i <= 2 * kTicks; ++i) {
      const double x = (std::ceil(xs.low / x_tick) + i) * x_tick;
      if (x <= xs.high)
        out += text_at(px(x), bottom + 16, "middle", fmt::format("{:.4g}", std::abs(x) < x_tick / 1e6 ? 0 : x));
    }
  } else {
    for (std::size_t i = 0; i < plot.categories.size(); ++i)
      out += text_at(px(static_cast<double>(i)), bottom + 16, "middle", plot.categories[i]);
  }
  out += text_at(kLeft + width / 2, bottom + 34, "middle", plot.x_title);
  for (std::size_t i = 0; i < plot.series.size(); ++i) {
    const PlotSeries& series = plot.series[i];
    const std::string colour = fmt::format("var(--c{})", i % 8);
    std::string path;
    for (const PlotPoint& p : series.points)
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px(p.x), py(p.y));
    if (series.joined)
      out += fmt::format("<path d='{}' fill='none' stroke-width='1.6' style='stroke:{}'/>", path, colour);
    for (const PlotPoint& p : series.points) {
      if (p.low && p.high)
        out += fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1:.1f}' y2='{2:.1f}' style='stroke:{3}'/>", px(p.x),
                           py(*p.low), py(*p.high), colour);
      out += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='{}' style='fill:{}'>{}</circle>\n", px(p.x), py(p.y),
                         series.joined && series.points.size() > 60 ? 1.2 : 3.2, colour, tip(plot, series, p));
    }
    if (!named) continue;
    const double y = kHeight + 12 + kLegendRow * static_cast<double>(i);
    out += fmt::format("<rect x='{}' y='{}' width='14' height='3' style='fill:{}'/>", kLeft, y - 5, colour);
    out += text_at(kLeft + 20, y, "start", series.name);
  }
  return out + "</svg>\n";
}

}  // namespace echoline::pages
