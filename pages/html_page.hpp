// A self-contained HTML page with text, tables and plots; light or dark by the reader's setting.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace echoline::pages {

// Texts may come from anywhere, so everything is escaped.
std::string escape_html(std::string_view text);
// JSON that cannot close the <script> element around it.
std::string script_json(const nlohmann::json& value);

struct PlotPoint {
  double x = 0;  // or the index of a category
  double y = 0;
  std::optional<double> low, high;  // an interval around y
  std::string note;                 // further text of the tooltip
  std::string link;                 // target of a click, relative to the page
};

struct PlotSeries {
  std::string name;
  std::vector<PlotPoint> points;  // sorted by x if joined
  bool joined = true;
};

struct Plot {
  std::string title, x_title, y_title;
  std::vector<std::string> categories;  // labels of x; empty: x is a number
  std::vector<PlotSeries> series;
};

// Limit of a series; more points are thinned out evenly.
inline constexpr std::size_t kPlotPointsMax = 2000;

struct PageCell {
  std::string text, link;
  bool number = false;  // right-aligned
};

// The library that draws plots: the source of Chart.js 3 and its licence. Without it, plots are SVG.
struct ChartLibrary {
  std::string_view source, licence;
};
// The library found at build time; empty if there was none.
ChartLibrary built_in_charts();

class Page {
 public:
  explicit Page(std::string_view title);
  void heading(std::string_view text);
  void paragraph(std::string_view text);
  void facts(const std::vector<std::pair<std::string, std::string>>& facts);
  void table(const std::vector<std::string>& titles, const std::vector<std::vector<PageCell>>& rows);
  void plots(std::vector<Plot> plots);  // omits plots without points
  std::string finish(const ChartLibrary& charts) const;

 private:
  std::string title_;
  struct Part {
    std::string html;
    std::vector<Plot> plots;
  };
  std::vector<Part> parts_;
};

// A plot as SVG, in the colours of the page's style.
std::string plot_svg(const Plot& plot);

}  // namespace echoline::pages
