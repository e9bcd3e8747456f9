// A self-contained HTML page with text, tables and plots; light or dark by the reader's setting.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace echoline::pages {

// Replaces < > & " ' by entities. Page escapes every text, because texts may come from untrusted workers.
std::string escape_html(std::string_view text);
// Returns JSON that cannot close the <script> element around it.
std::string script_json(const nlohmann::json& value);

struct PlotPoint {
  double x = 0;  // a position; with Plot::categories, the index of a category
  double y = 0;
  std::optional<double> low, high;  // ends of a confidence interval, drawn as an error bar; both or neither
  std::string note;                 // further text of the tooltip
  std::string link;                 // the page that a click opens; relative to this page
};

struct PlotSeries {
  std::string name;
  std::vector<PlotPoint> points;
  bool connect_points = true;  // draws a line through the points, which the caller must have sorted by x
};

struct Plot {
  std::string title, x_title, y_title;
  std::vector<std::string> categories;  // labels of x; empty: x is a number
  std::vector<PlotSeries> series;
};

// Page::add_plots() keeps at most this many points of a series, evenly spaced, so that pages stay small.
inline constexpr std::size_t kPlotPointsMax = 2000;

struct PageCell {
  std::string text, link;
  bool is_number = false;  // right-aligned
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
  void add_heading(std::string_view text);
  void add_paragraph(std::string_view text);
  // Adds a list of names and values.
  void add_definition_list(const std::vector<std::pair<std::string, std::string>>& entries);
  void add_table(const std::vector<std::string>& titles, const std::vector<std::vector<PageCell>>& rows);
  // Adds plots, without those that have no points.
  void add_plots(std::vector<Plot> plots);
  // Returns the whole page as HTML.
  std::string finish(const ChartLibrary& charts) const;

 private:
  void add_html(std::string html);

  std::string title_;
  struct Part {
    std::string html;
    std::vector<Plot> plots;
  };
  std::vector<Part> parts_;
};

// Returns the plot as SVG, in the colours of the page's style. Leaves out `y_title` and links.
std::string plot_svg(const Plot& plot);

}  // namespace echoline::pages
