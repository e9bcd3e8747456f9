// A page that needs nothing beside itself: text, tables and plots as one HTML file, light or dark as its reader likes.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace echoline::pages {

// Texts may come from anywhere; everything here is escaped on its way into the page.
std::string escape_html(std::string_view text);
// JSON that cannot end the <script> it stands in.
std::string script_json(const nlohmann::json& value);

struct PlotPoint {
  double x = 0;  // or the index of a category
  double y = 0;
  std::optional<double> low, high;  // an interval around y
  std::string note;                 // what the tooltip says beside x and y
  std::string link;                 // where a click leads, relative to the page
};

struct PlotSeries {
  std::string name;
  std::vector<PlotPoint> points;  // by x where they are joined
  bool joined = true;
};

struct Plot {
  std::string title, x_title, y_title;
  std::vector<std::string> categories;  // what x stands for; empty: x is a number
  std::vector<PlotSeries> series;
};

// Points of a series beyond this many are thinned out evenly.
inline constexpr std::size_t kPlotPointsMax = 2000;

struct PageCell {
  std::string text, link;
  bool number = false;  // set to the right
};

// What draws plots: the source of Chart.js 3 and its licence. Without it they are SVG, drawn here.
struct ChartLibrary {
  std::string_view source, licence;
};
// As it was found when this program was built; empty where it was not.
ChartLibrary built_in_charts();

class Page {
 public:
  explicit Page(std::string_view title);
  void heading(std::string_view text);
  void paragraph(std::string_view text);
  void facts(const std::vector<std::pair<std::string, std::string>>& facts);
  void table(const std::vector<std::string>& titles, const std::vector<std::vector<PageCell>>& rows);
  void plots(std::vector<Plot> plots);  // those that have points
  std::string finish(const ChartLibrary& charts) const;

 private:
  std::string title_;
  struct Part {
    std::string html;
    std::vector<Plot> plots;
  };
  std::vector<Part> parts_;
};

// One plot as SVG; its colours are those of the page's style.
std::string plot_svg(const Plot& plot);

}  // namespace echoline::pages
