// Builds the page of run reports and sweeps. The plots become JSON for Chart.js, or SVG without it.
#include "pages/html_page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "pages/html_assets.hpp"

namespace echoline::pages {
namespace {

using nlohmann::json;

constexpr std::size_t kTextBytesMax = 10'000;  // of each text; longer ones are cut

// Whether a link stays inside the page's folder and has no scheme, such as javascript:. Texts of untrusted workers must
// not lead the reader elsewhere.
bool is_safe_link(std::string_view link) {
  return !link.empty() && link.front() != '/' && link.find("..") == std::string_view::npos &&
         link.find(':') == std::string_view::npos;
}

std::string printable_and_limited(std::string_view text) { return printable(text, kTextBytesMax); }

json plot_json(const Plot& plot) {
  json out{{"title", printable_and_limited(plot.title)},
           {"x", printable_and_limited(plot.x_title)},
           {"y", printable_and_limited(plot.y_title)},
           {"series", json::array()}};
  for (const std::string& category : plot.categories) out["categories"].push_back(printable_and_limited(category));
  for (const PlotSeries& series : plot.series) {
    json points = json::array();
    for (const PlotPoint& plot_point : series.points) {
      json point{{"x", plot_point.x}, {"y", plot_point.y}};
      if (plot_point.low && plot_point.high) point["low"] = *plot_point.low, point["high"] = *plot_point.high;
      if (!plot_point.note.empty()) point["note"] = printable_and_limited(plot_point.note);
      if (is_safe_link(plot_point.link)) point["link"] = plot_point.link;
      points.push_back(std::move(point));
    }
    out["series"].push_back({{"name", printable_and_limited(series.name)},
                             {"joined", series.connect_points},
                             {"points", std::move(points)}});
  }
  return out;
}

// Removes points, and intervals, that are not finite. If more than kPlotPointsMax points are left, keeps that many at
// equal distances, the first and the last included.
void drop_nonfinite_and_thin(PlotSeries& series) {
  std::erase_if(series.points, [](const PlotPoint& plot_point) {
    return !std::isfinite(plot_point.x) || !std::isfinite(plot_point.y);
  });
  for (PlotPoint& plot_point : series.points)
    if (!plot_point.low || !plot_point.high || !std::isfinite(*plot_point.low) || !std::isfinite(*plot_point.high))
      plot_point.low = plot_point.high = std::nullopt;
  const std::size_t count = series.points.size();
  if (count <= kPlotPointsMax) return;
  std::vector<PlotPoint> kept_points;
  for (std::size_t i = 0; i < kPlotPointsMax; ++i)
    kept_points.push_back(std::move(series.points[i * (count - 1) / (kPlotPointsMax - 1)]));
  series.points = std::move(kept_points);
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string script_json(const json& value) {
  std::string out;
  // ASCII only, because JSON may contain U+2028, which older JavaScript takes for the end of a line.
  constexpr bool kAsciiOnly = true;
  for (const char c : value.dump(-1, ' ', kAsciiOnly, json::error_handler_t::replace)) {
    // Escaped as well, so that no text can end the <script> element.
    if (c == '<' || c == '>' || c == '&')
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out;
}

Page::Page(std::string_view title) : title_(printable_and_limited(title)) {}

void Page::add_html(std::string html) { parts_.push_back({.html = std::move(html), .plots = {}}); }

void Page::add_heading(std::string_view text) {
  add_html(fmt::format("<h2>{}</h2>\n", escape_html(printable_and_limited(text))));
}

void Page::add_paragraph(std::string_view text) {
  add_html(fmt::format("<p>{}</p>\n", escape_html(printable_and_limited(text))));
}

void Page::add_definition_list(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string html = "<dl>\n";
  for (const auto& [name, value] : entries)
    html += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escape_html(printable_and_limited(name)),
                        escape_html(printable_and_limited(value)));
  add_html(html + "</dl>\n");
}

void Page::add_table(const std::vector<std::string>& titles, const std::vector<std::vector<PageCell>>& rows) {
  std::string html = "<div class='wide'><table>\n<thead><tr>";
  for (std::size_t i = 0; i < titles.size(); ++i) {
    const bool is_number = !rows.empty() && i < rows.front().size() && rows.front()[i].is_number;
    html += fmt::format("<th{}>{}</th>", is_number ? " class='n'" : "", escape_html(printable_and_limited(titles[i])));
  }
  html += "</tr></thead>\n<tbody>\n";
  for (const auto& row : rows) {
    html += "<tr>";
    for (const PageCell& cell : row) {
      const std::string text = escape_html(printable_and_limited(cell.text));
      html += fmt::format(
          "<td{}>{}</td>", cell.is_number ? " class='n'" : "",
          is_safe_link(cell.link) ? fmt::format("<a href='{}'>{}</a>", escape_html(cell.link), text) : text);
    }
    html += "</tr>\n";
  }
  add_html(html + "</tbody></table></div>\n");
}

void Page::add_plots(std::vector<Plot> plots) {
  for (Plot& plot : plots) {
    for (PlotSeries& series : plot.series) drop_nonfinite_and_thin(series);
    std::erase_if(plot.series, [](const PlotSeries& plot_series) { return plot_series.points.empty(); });
  }
  std::erase_if(plots, [](const Plot& plot) { return plot.series.empty(); });
  if (!plots.empty()) parts_.push_back({.html = "", .plots = std::move(plots)});
}

std::string Page::finish(const ChartLibrary& charts) const {
  std::string out = fmt::format(
      "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n<meta name='viewport' "
      "content='width=device-width, initial-scale=1'>\n"
      "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'; script-src "
      "'unsafe-inline'\">\n"
      "<title>{0}</title>\n<style>\n{1}</style>\n</head>\n<body>\n<h1>{0}</h1>\n",
      escape_html(title_), page_style());
  json plots_json = json::array();
  for (const Part& part : parts_) {
    out += part.html;
    if (part.plots.empty()) continue;
    out += "<div class='plots'>\n";
    for (const Plot& plot : part.plots) {
      const std::string title = escape_html(printable_and_limited(plot.title));
      if (charts.source.empty()) {  // without Chart.js
        out += fmt::format("<figure><figcaption>{}</figcaption>{}</figure>\n", title, plot_svg(plot));
      } else {
        out += fmt::format(
            "<figure><figcaption>{}</figcaption><div class='canvas'><canvas id='plot{}' role='img' "
            "aria-label='{}'></canvas></div></figure>\n",
            title, plots_json.size(), title);
        plots_json.push_back(plot_json(plot));
      }
    }
    out += "</div>\n";
  }
  if (!plots_json.empty()) {
    out += fmt::format("<script type='application/json' id='plots'>{}</script>\n", script_json(plots_json));
    out += "<script>";
    out += charts.source;
    out += "</script>\n<script>\n";
    out += page_script();
    out += "</script>\n";
    out += fmt::format(
        "<footer><details><summary>This page contains Chart.js, which draws the plots. Show its "
        "licence</summary><pre>{}</pre></details></footer>\n",
        escape_html(charts.licence));
  }
  return out + "</body>\n</html>\n";
}

}  // namespace echoline::pages
