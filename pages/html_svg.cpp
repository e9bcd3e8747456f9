// Draws plots as SVG, for programs built without Chart.js.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "pages/html_page.hpp"

namespace echoline::pages {
namespace {

constexpr double kWidth = 560, kHeight = 260, kLeftMargin = 64, kRightMargin = 14, kTopMargin = 12, kBottomMargin = 40,
                 kLegendRowHeight = 18;
constexpr double kTickLabelDistance = 16, kAxisTitleDistance = 34;  // below the x axis
constexpr std::size_t kLargePointsMax = 60;  // the points of a line with more of them are drawn small
constexpr int kTickCount = 5;                // approximate number of ticks per axis
constexpr std::size_t kColourCount = 8;      // --c0 to --c7 in the page's style
constexpr std::size_t kLabelBytesMax = 200, kTooltipBytesMax = 1000;

struct AxisRange {
  double low = 0, high = 1;
};

// The range of an axis: the values with a margin of 5 % at each end. It starts at 0 if `low` is in [0, high / 2). If
// all values equal v, the range is v ± |v| / 2, or -1 to 1 for 0.
AxisRange axis_range(double low, double high) {
  if (!(low < high)) return {low - (low == 0 ? 1 : std::abs(low) / 2), high + (high == 0 ? 1 : std::abs(high) / 2)};
  if (low >= 0 && low < high / 2) return {0, high * 1.05};
  return {low - (high - low) * 0.05, high + (high - low) * 0.05};
}

// Returns 1, 2 or 5 times a power of ten, about `span` / kTickCount.
double tick_distance(double span) {
  const double power = std::pow(10, std::floor(std::log10(span / kTickCount)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (span / (factor * power) <= kTickCount + 1) return factor * power;
  return 10 * power;
}

std::string text_at(double x, double y, std::string_view anchor, std::string_view text) {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}'>{}</text>", x, y, anchor,
                     escape_html(printable(text, kLabelBytesMax)));
}

// The <title> element of a point, which the browser shows as a tooltip.
std::string point_tooltip(const Plot& plot, const PlotSeries& series, const PlotPoint& point) {
  // With categories, x is the index of one. max(), because a negative double must not become an unsigned number.
  const auto category = static_cast<std::size_t>(std::max(0.0, point.x));
  std::string text = series.name.empty() ? "" : series.name + ": ";
  text += fmt::format("{} {}, {:.4g}", plot.x_title,
                      category < plot.categories.size() ? plot.categories[category] : fmt::format("{:.4g}", point.x),
                      point.y);
  if (point.low && point.high) text += fmt::format(" ({:.4g} to {:.4g})", *point.low, *point.high);
  if (!point.note.empty()) text += "; " + point.note;
  return fmt::format("<title>{}</title>", escape_html(printable(text, kTooltipBytesMax)));
}

}  // namespace

std::string plot_svg(const Plot& plot) {
  double x_low = INFINITY, x_high = -INFINITY, y_low = INFINITY, y_high = -INFINITY;
  for (const PlotSeries& series : plot.series)
    for (const PlotPoint& point : series.points) {
      x_low = std::min(x_low, point.x), x_high = std::max(x_high, point.x);
      y_low = std::min({y_low, point.y, point.low.value_or(point.y)}),
      y_high = std::max({y_high, point.y, point.high.value_or(point.y)});
    }
  // Without points, or with a range too large for a double, there is nothing to draw.
  if (!(x_low <= x_high) || !std::isfinite(y_high - y_low) || !std::isfinite(x_high - x_low)) return "";
  const AxisRange y_range = axis_range(y_low, y_high);
  // An x axis of numbers has no margin, unless all points have the same x.
  const AxisRange x_range = plot.categories.empty()
                                ? (x_low < x_high ? AxisRange{x_low, x_high} : axis_range(x_low, x_high))
                                : AxisRange{-0.5, static_cast<double>(plot.categories.size()) - 0.5};
  // Pixels: the lower edge and the width of the area inside the axes.
  const double bottom = kHeight - kBottomMargin, width = kWidth - kLeftMargin - kRightMargin;
  const auto pixel_x = [&](double x) { return kLeftMargin + (x - x_range.low) / (x_range.high - x_range.low) * width; };
  const auto pixel_y = [&](double y) {
    return bottom - (y - y_range.low) / (y_range.high - y_range.low) * (bottom - kTopMargin);
  };
  const bool has_legend = plot.series.size() > 1;
  const double height = kHeight + (has_legend ? kLegendRowHeight * static_cast<double>(plot.series.size()) : 0);
  std::string out = fmt::format("<svg viewBox='0 0 {} {}' role='img'>\n", kWidth, height);
  // An axis has at most kTickCount + 2 ticks. The loops over ticks are bounded, because in a tiny range at large values
  // rounding can make all ticks equal, and y would then never exceed the range.
  const double y_tick = tick_distance(y_range.high - y_range.low);
  for (int i = 0; i <= 2 * kTickCount; ++i) {
    const double y = (std::ceil(y_range.low / y_tick) + i) * y_tick;
    if (y > y_range.high) break;
    out += fmt::format("<line class='grid' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>", kLeftMargin, kLeftMargin + width,
                       pixel_y(y), pixel_y(y));
    // Rounding may leave 1e-17 or -0 where the tick is 0.
    out += text_at(kLeftMargin - 6, pixel_y(y) + 4, "end", fmt::format("{:.4g}", std::abs(y) < y_tick / 1e6 ? 0 : y));
  }
  if (plot.categories.empty()) {
    const double x_tick = tick_distance(x_range.high - x_range.low);
    for (int i = 0; i <= 2 * kTickCount; ++i) {
      const double x = (std::ceil(x_range.low / x_tick) + i) * x_tick;
      if (x <= x_range.high)
        out += text_at(pixel_x(x), bottom + kTickLabelDistance, "middle",
                       fmt::format("{:.4g}", std::abs(x) < x_tick / 1e6 ? 0 : x));
    }
  } else {
    for (std::size_t i = 0; i < plot.categories.size(); ++i)
      out += text_at(pixel_x(static_cast<double>(i)), bottom + kTickLabelDistance, "middle", plot.categories[i]);
  }
  out += text_at(kLeftMargin + width / 2, bottom + kAxisTitleDistance, "middle", plot.x_title);
  for (std::size_t i = 0; i < plot.series.size(); ++i) {
    const PlotSeries& series = plot.series[i];
    const std::string colour = fmt::format("var(--c{})", i % kColourCount);
    std::string path;
    for (const PlotPoint& point : series.points)
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", pixel_x(point.x), pixel_y(point.y));
    if (series.connect_points)
      out += fmt::format("<path d='{}' fill='none' stroke-width='1.6' style='stroke:{}'/>", path, colour);
    for (const PlotPoint& point : series.points) {
      if (point.low && point.high)
        out += fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1:.1f}' y2='{2:.1f}' style='stroke:{3}'/>",
                           pixel_x(point.x), pixel_y(*point.low), pixel_y(*point.high), colour);
      out += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='{}' style='fill:{}'>{}</circle>\n", pixel_x(point.x),
                         pixel_y(point.y), series.connect_points && series.points.size() > kLargePointsMax ? 1.2 : 3.2,
                         colour, point_tooltip(plot, series, point));
    }
    if (!has_legend) continue;
    const double y = kHeight + 12 + kLegendRowHeight * static_cast<double>(i);
    out += fmt::format("<rect x='{}' y='{}' width='14' height='3' style='fill:{}'/>", kLeftMargin, y - 5, colour);
    out += text_at(kLeftMargin + 20, y, "start", series.name);
  }
  return out + "</svg>\n";
}

}  // namespace echoline::pages
