// Draws a run as SVG, for `echoline report`.
#include "cli/plot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace echoline::cli {
namespace {

using nlohmann::json;

// Sizes in pixels, as are the small offsets of texts below.
constexpr double kWidth = 900, kPanelHeight = 150, kLeftMargin = 70, kRightMargin = 170, kTopMargin = 48,
                 kPanelGap = 42;  // the right margin has the names of the series

struct Series {
  std::string name;
  const char* colour;
  std::map<double, double> points;  // x -> y
  bool is_scatter = false;          // single measurements, without a line between them
};

struct Panel {
  std::string title;
  std::vector<Series> series;
};

// The smallest of 1, 2 or 5 times a power of ten that is at least `value`.
double round_up(double value) {
  if (!(value > 0)) return 1;
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0, 10.0})
    if (value <= factor * power * (1 + 1e-9)) return factor * power;  // 1e-9: for rounding errors in `power`
  return 10 * power;
}

// Draws a panel whose upper edge is at `top` pixels. All panels have the same x axis, from 0 to `x_max`.
std::string panel_svg(const Panel& panel, double top, double x_max) {
  double y_max = 0;
  for (const Series& series : panel.series)
    for (const auto& [x, y] : series.points) y_max = std::max(y_max, y);
  y_max = round_up(y_max);
  const double width = kWidth - kLeftMargin - kRightMargin;
  const auto pixel_x = [&](double x) { return kLeftMargin + x / x_max * width; };
  const auto pixel_y = [&](double y) { return top + kPanelHeight - y / y_max * kPanelHeight; };
  std::string out = fmt::format("<text x='{}' y='{}' class='t'>{}</text>\n", kLeftMargin, top - 8, panel.title);
  constexpr int kGridLines = 4;  // above the axis
  for (int i = 0; i <= kGridLines; ++i) {
    const double y = y_max * i / kGridLines;
    out += fmt::format(
        "<line x1='{}' x2='{:.1f}' y1='{:.1f}' y2='{:.1f}' class='g'/><text x='{}' y='{:.1f}' "
        "text-anchor='end'>{:g}</text>\n",
        kLeftMargin, kLeftMargin + width, pixel_y(y), pixel_y(y), kLeftMargin - 8, pixel_y(y) + 4, y);
  }
  for (std::size_t i = 0; i < panel.series.size(); ++i) {
    const Series& series = panel.series[i];
    std::string path;
    for (const auto& [x, y] : series.points) {
      if (series.is_scatter)
        out +=
            fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='4' fill='{}'/>\n", pixel_x(x), pixel_y(y), series.colour);
      else
        path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", pixel_x(x), pixel_y(y));
    }
    if (!path.empty())
      out += fmt::format("<path d='{}' fill='none' stroke='{}' stroke-width='1.6'/>\n", path, series.colour);
    out += fmt::format("<text x='{:.1f}' y='{:.1f}' style='fill:{}'>{}</text>\n", kLeftMargin + width + 12,
                       top + 14 + 18 * static_cast<double>(i), series.colour, series.name);
  }
  return out;
}

}  // namespace

std::string run_svg(const std::string& title, const std::vector<json>& metrics) {
  Series reward{"mean reward", "#1b6ca8", {}};
  Series evaluation{.name = "held-out accuracy", .colour = "#c0392b", .points = {}, .is_scatter = true};
  Series wait{"waiting for rollouts", "#c0392b", {}}, train{"training", "#1b6ca8", {}};
  // T_b is the time from publishing a policy until most workers have installed it.
  Series t_b{"T_b (0.9 of fleet)", "#1b6ca8", {}}, predicted{"transfer, formula", "#7f8c8d", {}},
      lower_bound{"lower bound", "#27ae60", {}};
  Series oldest_age_series{"oldest rollout", "#c0392b", {}}, mean_age_series{"mean", "#1b6ca8", {}};
  double x_max = 1;
  for (const json& row : metrics) {
    const std::string kind = row.value("kind", "");
    if (kind == "step") {
      const double x = row.at("step");
      x_max = std::max(x_max, x);
      reward.points[x] = row.at("reward_mean");
      wait.points[x] = row.at("wait_seconds");
      train.points[x] = row.at("train_seconds");
      double trajectories = 0, age_sum = 0, oldest_age = 0;
      // Staleness is a rollout's age in learner steps. The object counts rollouts by age.
      for (const auto& [age, count] : row.at("staleness").items()) {
        trajectories += count.get<double>();
        age_sum += std::stod(age) * count.get<double>();
        oldest_age = std::max(oldest_age, std::stod(age));
      }
      oldest_age_series.points[x] = oldest_age;
      mean_age_series.points[x] = trajectories > 0 ? age_sum / trajectories : 0;
    } else if (kind == "evaluation") {
      evaluation.points[row.at("step")] = row.at("accuracy");
    } else if (kind == "broadcast" && !row.value("snapshot", false)) {
      const double x = row.at("version");
      t_b.points[x] = row.at("t_b_seconds");
      lower_bound.points[x] = row.at("lower_bound_seconds");
      if (row.contains("predicted_seconds")) predicted.points[x] = row.at("predicted_seconds");
    }
  }
  const std::vector<Panel> panels{
      {"reward and accuracy", {reward, evaluation}},
      {"seconds of a learner step", {wait, train}},
      {"seconds from publishing a policy to its installation on the workers", {t_b, predicted, lower_bound}},
      {"staleness, learner steps", {oldest_age_series, mean_age_series}}};
  const double height = kTopMargin + static_cast<double>(panels.size()) * (kPanelHeight + kPanelGap) + 10;
  std::string out = fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {0} {1}' width='{0}' height='{1}'>\n"
      "<style>text{{font:12px sans-serif;fill:#333}}.t{{font-weight:bold}}.g{{stroke:#ddd}}</style>\n"
      "<rect width='100%' height='100%' fill='#fff'/>\n<text x='{2}' y='20' class='t'>{3}</text>\n",
      kWidth, height, kLeftMargin, title);
  double top = kTopMargin + 14;
  for (const Panel& panel : panels) {
    out += panel_svg(panel, top, x_max);
    top += kPanelHeight + kPanelGap;
  }
  out += fmt::format("<text x='{}' y='{:.1f}' text-anchor='end'>learner step 0 to {:g}</text>\n</svg>\n",
                     kWidth - kRightMargin, top - kPanelGap + 20, x_max);
  return out;
}

}  // namespace echoline::cli
