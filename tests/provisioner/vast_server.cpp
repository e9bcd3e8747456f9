// The test's vast.ai: answers requests from its own table of instances.
#include "vast_server.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <httplib.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

namespace echoline::provisioner {

using httplib::Request;
using httplib::Response;
using nlohmann::json;

namespace {

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

int free_port_of_this_machine() {
  const int socket = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof address;
  ::bind(socket, reinterpret_cast<sockaddr*>(&address), size);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(socket);
  return ntohs(address.sin6_port);
}

// Whether an offer's field meets a condition such as {"gte": 3}.
bool meets(const json& value, const json& condition) {
  for (const auto& [word, bound] : condition.items()) {
    const bool is_met = word == "eq"    ? value == bound
                        : word == "gte" ? !value.is_null() && value >= bound
                        : word == "lte" ? !value.is_null() && value <= bound
                        : word == "in"  ? std::find(bound.begin(), bound.end(), value) != bound.end()
                                        : false;
    if (!is_met) return false;
  }
  return true;
}

}  // namespace

struct VastServer::Impl {
  httplib::Server server;
  std::thread thread;
  int port = 0;
  mutable std::mutex mutex;
  std::map<std::int64_t, VastInstance> rented;
  std::map<std::string, int> counts;
  std::vector<VastFault> faults;
  std::set<std::int64_t> gone;
  std::vector<std::string> bodies;
  std::string headers;
  std::function<void(int)> at_point;
  std::int64_t next_id = 1000;
  int points = 0;
  bool lists_nothing = false, expired = false;
  using Clock = std::chrono::steady_clock;
  double speed = 0;  // of limit_rates(); 0: no limits
  std::map<std::string, Clock::time_point> last_requests;
  int too_frequent = 0;
  bool takes_several = true;
  double failure_probability = 0;
  std::mt19937_64 random;
  std::set<std::int64_t> destroyed_in_vain;
  std::optional<std::chrono::milliseconds> containers_run_after;
  std::map<std::int64_t, Clock::time_point> created_at;
  std::vector<VastCharge> charges;
  double credit = 100;
  std::vector<VastRental> rentals;
  bool bills_rentals = false;
  bool fails_in_every_way = false;
  std::chrono::milliseconds hang{0};
  std::function<void(const VastInstance&, const std::string&)> created;
  std::function<void(std::int64_t)> destroyed;
  std::function<void(const std::string&)> log;
  std::condition_variable ends;  // notified when the server ends, for requests that hang
  bool is_ending = false;

  static double unix_now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }

  // The log-call itself runs without the lock.
  void write_log(const std::string& line) {
    std::function<void(const std::string&)> call;
    {
      const std::lock_guard lock(mutex);
      call = log;
    }
    if (call) call(line);
  }

  json offers = json::array();
  std::vector<std::string> searches;
  struct Commands {
    std::filesystem::path folder;
    std::map<std::string, std::string> environment;
  };
  std::optional<Commands> commands;
  std::map<std::int64_t, pid_t> processes;  // by instance
  std::map<std::int64_t, double> started_unix_s;
  std::set<std::int64_t> rented_asks;

  void start_process(std::int64_t id, const json& body) {
    std::string command = body.at("args").at(1);
    const std::string port = std::to_string(free_port_of_this_machine()), inside = "'7070'";
    if (const auto at = command.find(inside); at != std::string::npos) command.replace(at, inside.size(), port);
    std::map<std::string, std::string> environment = commands->environment;
    for (const auto& [name, value] : body.at("env").items())
      if (!name.starts_with("-p ")) environment[name] = value;
    environment["CONTAINER_ID"] = std::to_string(id);
    environment["CONTAINER_API_KEY"] = kKey;
    environment["ECHOLINE_VAST_URL"] = "http://127.0.0.1:" + std::to_string(this->port);
    environment["PUBLIC_IPADDR"] = "127.0.0.1";
    environment["VAST_TCP_PORT_" + port] = port;
    environment["HOME"] = commands->folder / std::to_string(id);
    std::filesystem::create_directories(environment["HOME"]);
    std::vector<std::string> texts;
    for (const auto& [name, value] : environment) texts.push_back(name + "=" + value);
    std::vector<char*> variables;
    for (std::string& text : texts) variables.push_back(text.data());
    variables.push_back(nullptr);
    std::string shell = body.at("onstart"), option = body.at("args").at(0);
    char* arguments[] = {shell.data(), option.data(), command.data(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    const std::string log = environment["HOME"] + ".log";
    posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    pid_t pid = 0;
    if (::posix_spawn(&pid, shell.c_str(), &actions, &attributes, arguments, variables.data()) == 0)
      processes[id] = pid;
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    started_unix_s[id] = unix_seconds();
  }

  // Ends an instance, and adds its row to the bill if it was a process. Returns whether it was rented.
  bool end_instance(std::int64_t id) {
    const auto it = rented.find(id);
    if (it == rented.end()) return false;
    if (const auto process = processes.find(id); process != processes.end()) {
      ::kill(-process->second, SIGKILL);
      ::waitpid(process->second, nullptr, 0);
      processes.erase(process);
      const double started = started_unix_s.at(id);
      charges.push_back(
          {.instance = id, .start = started, .gpu = (unix_seconds() - started) / 3600 * it->second.usd_per_hour});
    }
    rented.erase(it);
    return true;
  }

  void search(const Request& request, Response& response) {
    const std::lock_guard lock(mutex);
    ++counts["search"];
    searches.push_back(request.body);
    const json body = json::parse(request.body, nullptr, false);
    if (!body.is_object()) return answer(response, 400, {{"success", false}, {"error", "invalid_args"}});
    json found = json::array();
    for (const json& offer : offers) {
      json fields = offer;  // some conditions have other names or values than the fields that state them
      // A search compares "US" with "Ohio, US".
      const std::string place = offer.value("geolocation", "");
      fields["geolocation"] = place.substr(std::min(place.size(), place.rfind(' ') + 1));
      fields["verified"] = offer.at("verification") == "verified";
      fields["datacenter"] = offer.at("hosting_type") == 1;
      bool is_found = rented_asks.count(offer.at("id").get<std::int64_t>()) == 0;
      for (const auto& [name, condition] : body.items())
        if (condition.is_object()) is_found = is_found && fields.contains(name) && meets(fields[name], condition);
      if (is_found) found.push_back(offer);
    }
    answer(response, 200, {{"success", true}, {"offers", found}});
  }

  static void answer(Response& response, int status, const json& body) {
    response.status = status;
    response.set_content(body.dump(), "application/json");
  }

  // Seconds between two requests of a kind.
  static double interval_s(const std::string& kind) {
    static const std::map<std::string, double> kIntervals{{"create", 4.5}, {"destroy", 3}, {"show", 2},
                                                          {"list", 1},     {"bid", 5.5},   {"charges", 1}};
    const auto it = kIntervals.find(kind);
    return it == kIntervals.end() ? 0 : it->second;
  }

  bool comes_too_soon(const std::string& kind, const std::string& key) {
    if (speed <= 0) return false;
    const auto now = Clock::now();
    const auto [last, is_first] = last_requests.try_emplace(kind + " " + key, now);
    if (is_first) return false;
    // A tenth of tolerance, because requests are delayed differently on their way.
    const bool is_too_soon = std::chrono::duration<double>(now - last->second).count() * speed < 0.9 * interval_s(kind);
    if (!is_too_soon) last->second = now;
    return is_too_soon;
  }

  // Counts the request and checks the key. Returns the next fault for this kind of request, if there is one.
  std::optional<VastFault> enter(const std::string& kind, const Request& request, Response& response, bool& refused) {
    const std::lock_guard lock(mutex);
    ++counts[kind];
    for (const auto& [name, value] : request.headers) headers += name + ": " + value + "\n";
    const std::string key = request.get_header_value("Authorization");
    refused = (expired || key != std::string("Bearer ") + kKey) && !is_own_end(request, key);
    if (refused) {  // with the status of the real service, which is not 401
      answer(response, 404,
             {{"success", false}, {"error", "auth_error"}, {"msg", std::string("Invalid user key ") + kKey}});
      return std::nullopt;
    }
    if (comes_too_soon(kind, key)) {
      ++too_frequent;
      return VastFault{.kind = kind, .status = 429, .body = "API requests too frequent"};
    }
    std::uniform_real_distribution<double> uniform;
    if (failure_probability > 0 && uniform(random) < failure_probability) {
      const double kind_of_fault = uniform(random);
      if (fails_in_every_way) return any_fault(kind, kind_of_fault, uniform(random) < 0.5);
      return VastFault{.kind = kind,
                       .status = kind_of_fault < 0.3   ? 502
                                 : kind_of_fault < 0.6 ? 500
                                                       : 200,
                       .body = kind_of_fault < 0.6 ? "Internal Server Error" : "<html>",
                       .acts = uniform(random) < 0.5};
    }
    for (std::size_t i = 0; i < faults.size(); ++i) {
      if (faults[i].kind != kind) continue;
      const VastFault fault = faults[i];
      if (--faults[i].times == 0) faults.erase(faults.begin() + static_cast<std::ptrdiff_t>(i));
      return fault;
    }
    return std::nullopt;
  }

  // The failure for a number of 0 to 1. Only a request with status 429 is never carried out.
  VastFault any_fault(const std::string& kind, double number, bool acts) const {
    VastFault fault{.kind = kind, .acts = acts};
    if (number < 0.15)
      fault.status = 502;
    else if (number < 0.3)
      fault.status = 500;
    else if (number < 0.45)
      fault.status = 429, fault.body = "API requests too frequent", fault.acts = false;
    else if (number < 0.6)
      fault.status = 200, fault.body = "<html>";
    else if (number < 0.75)
      fault.status = 200, fault.body = R"({"success": false, "error": "internal", "msg": "try again"})",
      fault.type = "application/json";
    else if (number < 0.9)
      fault.status = 0;
    else
      fault.status = 0, fault.hangs = hang;
    return fault;
  }

  // Whether a container's key destroys its own instance.
  bool is_own_end(const Request& request, const std::string& key) const {
    constexpr std::string_view kFolder = "/api/v0/instances/";
    if (request.method != "DELETE" || !std::string_view(request.path).starts_with(kFolder)) return false;
    const std::int64_t id = std::atoll(request.path.c_str() + kFolder.size());
    return rented.count(id) > 0 && key == "Bearer " + key_of(id);
  }

  // Ends the rental; the caller holds the lock and calls `destroyed` afterwards.
  bool end_rental(std::int64_t id) {
    if (!end_instance(id)) return false;
    for (VastRental& rental : rentals)
      if (rental.instance == id && rental.end == 0) rental.end = unix_now();
    ended_now.push_back(id);
    return true;
  }
  std::vector<std::int64_t> ended_now;  // for which `destroyed` was not called yet
  std::vector<std::pair<VastInstance, std::string>> created_now;

  void report_rentals() {
    std::unique_lock lock(mutex);
    const auto begun = std::exchange(created_now, {});
    const auto ended = std::exchange(ended_now, {});
    const auto on_created = created;
    const auto on_destroyed = destroyed;
    lock.unlock();
    for (const auto& [instance, body] : begun)
      if (on_created) on_created(instance, body);
    for (const std::int64_t id : ended)
      if (on_destroyed) on_destroyed(id);
  }

  void point() {
    std::function<void(int)> call;
    int number = 0;
    {
      const std::lock_guard lock(mutex);
      call = at_point;
      number = points++;
    }
    if (call) call(number);
  }

  template <class Act>
  void serve(const std::string& kind, bool changes, const Request& request, Response& response, Act&& act) {
    bool refused = false;
    const auto fault = enter(kind, request, response, refused);
    if (refused) return write_log(fmt::format("{} {}: the key is refused", request.method, request.path));
    if (changes) point();
    if (!fault || fault->acts) {
      const std::lock_guard lock(mutex);
      const std::size_t rentals_before = rentals.size();
      act();
      if (rentals.size() > rentals_before && fault && fault->type == "application/json") rentals.back().disowned = true;
    }
    report_rentals();
    if (changes) point();
    if (fault || changes)
      write_log(fmt::format("{} {} {}{}", request.method, request.path, request.method == "DELETE" ? request.body : "",
                            !fault ? fmt::format("-> {}", response.body)
                                   : fmt::format("-> fault {} after {} ms{}: {}", fault->status, fault->hangs.count(),
                                                 fault->acts ? ", carried out" : "", fault->body)));
    if (!fault) return;
    {
      std::unique_lock lock(mutex);
      ends.wait_for(lock, fault->hangs, [&] { return is_ending; });
    }
    if (fault->status == 0) {  // the connection breaks during the answer
      response.status = 200;
      response.set_content_provider(100, "application/json", [](std::size_t, std::size_t, auto&) { return false; });
      return;
    }
    response.status = fault->status;
    response.set_content(fault->body, fault->type.c_str());
  }

  json instance_json(VastInstance i) const {
    const auto created = created_at.find(i.id);
    if (const auto process = processes.find(i.id); process != processes.end()) {
      siginfo_t end{};
      ::waitid(P_PID, static_cast<id_t>(process->second), &end, WEXITED | WNOHANG | WNOWAIT);
      i.actual_status = end.si_pid == 0 ? "running" : "exited";
    }
    if (containers_run_after && i.actual_status == "loading" && created != created_at.end() &&
        Clock::now() - created->second >= *containers_run_after)
      i.actual_status = "running";
    return {{"id", i.id},
            {"label", i.label},
            {"actual_status", i.actual_status.empty() ? json() : json(i.actual_status)},
            {"intended_status", i.intended.empty() ? i.state : i.intended},
            {"cur_state", i.state},
            {"next_state", i.state},
            {"status_msg", nullptr},
            {"public_ipaddr", "127.0.0.1"},
            {"ports", {{"7070/tcp", json::array({{{"HostIp", "0.0.0.0"}, {"HostPort", "41234"}}})}}},
            {"dph_total", i.usd_per_hour},
            {"is_bid", i.is_bid},
            {"min_bid", i.min_bid}};
  }

  void create(const Request& request, Response& response) {
    serve("create", true, request, response, [&] {
      const std::int64_t ask = std::stoll(request.matches[1]);
      bodies.push_back(request.body);
      const json body = json::parse(request.body, nullptr, false);
      if (!body.is_object() || !body.contains("image") || !body["env"].is_object())
        return answer(response, 400, {{"success", false}, {"error", "invalid_args"}, {"msg", "args"}});
      if (gone.count(ask) > 0)
        return answer(response, 410, {{"success", false}, {"error", "no_such_ask"}, {"msg", "Instance type is gone"}});
      VastInstance i;
      i.id = next_id++;
      i.label = body.value("label", "");
      i.image = body["image"];
      i.is_bid = body.contains("price");
      if (i.is_bid) i.bid = body["price"];
      const bool is_low = i.is_bid && i.bid < i.min_bid;
      if (is_low) i.state = "stopped";
      for (const json& offer : offers)
        if (offer.at("id") == ask)
          i.usd_per_hour = offer.at("dph_base").get<double>() +
                           body.value("disk", 10.0) * offer.at("storage_cost").get<double>() / 720;
      rented_asks.insert(ask);
      rented[i.id] = i;
      if (commands) start_process(i.id, body);
      created_at[i.id] = Clock::now();
      rentals.push_back({.instance = i.id, .label = i.label, .begin = unix_now(), .usd_per_hour = i.usd_per_hour});
      created_now.emplace_back(i, request.body);
      if (is_low)  // a quirk of the service: it refuses, but the instance exists
        return answer(response, 400,
                      {{"success", false}, {"error", "invalid_price"}, {"msg", "bid too low"}, {"new_contract", i.id}});
      answer(response, 200, {{"success", true}, {"new_contract", i.id}, {"instance_api_key", "inside"}});
    });
  }

  void destroy(const Request& request, Response& response) {
    serve("destroy", true, request, response, [&] {
      if (!end_rental(std::stoll(request.matches[1])))
        return answer(response, 404, {{"success", false}, {"error", "no_such_instance"}, {"msg", "not found"}});
      answer(response, 200, {{"success", true}});
    });
  }

  // Several instances at once, as the service's own client does.
  void destroy_together(const Request& request, Response& response) {
    serve("destroy", true, request, response, [&] {
      const json ids = json::parse(request.body, nullptr, false).value("instance_ids", json());
      if (!takes_several || !ids.is_array())
        return answer(response, 404, {{"success", false}, {"error", "invalid_args"}, {"msg", "instance_ids"}});
      for (const json& id : ids)
        if (destroyed_in_vain.count(id.get<std::int64_t>()) == 0) end_rental(id.get<std::int64_t>());
      answer(response, 200, {{"success", true}});
    });
  }

  void show(const Request& request, Response& response) {
    serve("show", false, request, response, [&] {
      const auto it = rented.find(std::stoll(request.matches[1]));
      answer(response, 200, {{"instances", it == rented.end() ? json() : instance_json(it->second)}});
    });
  }

  void bid(const Request& request, Response& response) {
    serve("bid", true, request, response, [&] {
      const auto it = rented.find(std::stoll(request.matches[1]));
      const json body = json::parse(request.body, nullptr, false);
      if (it == rented.end()) return answer(response, 404, {{"success", false}, {"error", "no_such_instance"}});
      const double price = body.value("price", 0.0);
      if (body.value("client_id", "") != "me" || price < it->second.min_bid)
        return answer(response, 400, {{"success", false}, {"error", "invalid_price"}, {"msg", "bid too low"}});
      it->second.bid = it->second.usd_per_hour = price;
      answer(response, 200, {{"success", true}});
    });
  }

  // A stopped instance does not resume by itself when its bid suffices.
  void state(const Request& request, Response& response) {
    serve("state", true, request, response, [&] {
      const auto it = rented.find(std::stoll(request.matches[1]));
      if (it == rented.end()) return answer(response, 404, {{"success", false}, {"error", "no_such_instance"}});
      if (it->second.is_bid && it->second.bid < it->second.min_bid)
        return answer(response, 400, {{"success", false}, {"error", "invalid_price"}});
      it->second.state = json::parse(request.body, nullptr, false).value("state", "");
      answer(response, 200, {{"success", true}});
    });
  }

  // Days of instances, two per page regardless of the requested limit. Some amounts are text.
  void show_charges(const Request& request, Response& response) {
    serve("charges", false, request, response, [&] {
      const json filters = json::parse(request.get_param_value("select_filters"), nullptr, false);
      if (!filters.is_object() || !filters.contains("day"))
        return answer(response, 400, {{"success", false}, {"error", "invalid_args"}});
      json rows = json::array();
      if (bills_rentals) {
        charges.clear();
        for (const VastRental& rental : rentals)
          charges.push_back({.instance = rental.instance, .start = rental.begin, .gpu = rental.usd(unix_now())});
      }
      constexpr std::size_t kPageRows = 2;
      std::size_t next_index =
          request.has_param("after_token") ? std::stoul(request.get_param_value("after_token")) : 0;
      for (; next_index < charges.size() && rows.size() < kPageRows; ++next_index) {
        const VastCharge& c = charges[next_index];
        if (c.start < filters["day"]["gte"].get<double>() || c.start > filters["day"]["lte"].get<double>()) continue;
        json items = json::array();
        for (const auto& [type, amount] : {std::pair{"gpu", c.gpu}, {"disk", c.disk}, {"bwd", c.bwd}, {"bwu", c.bwu}})
          items.push_back({{"type", type}, {"amount", amount}, {"source", nullptr}, {"items", json::array()}});
        rows.push_back({{"start", c.start},
                        {"end", c.start},
                        {"type", c.instance > 0 ? "instance" : "volume"},
                        {"source", fmt::format("{}-{}", c.instance > 0 ? "instance" : "volume", c.instance)},
                        {"amount", fmt::format("{}", c.gpu + c.disk + c.bwd + c.bwu)},
                        {"items", items}});
      }
      const json next = next_index < charges.size() ? json(std::to_string(next_index)) : json();
      answer(response, 200,
             {{"success", true},
              {"count", rows.size()},
              {"total", charges.size()},
              {"next_token", next},
              {"results", rows}});
    });
  }

  void list(const Request& request, Response& response) {
    serve("list", false, request, response, [&] {
      json page = json::array();
      const std::int64_t after =
          request.has_param("after_token") ? std::stoll(request.get_param_value("after_token")) : 0;
      json next;
      for (const auto& [id, instance] : rented) {
        if (id <= after || lists_nothing) continue;
        constexpr std::size_t kPageInstances = 25;
        if (page.size() == kPageInstances) {
          next = std::to_string(page.back()["id"].get<std::int64_t>());
          break;
        }
        page.push_back(instance_json(instance));
      }
      answer(response, 200, {{"success", true}, {"instances", page}, {"next_token", next}});
    });
  }
};

VastServer::VastServer() : impl_(std::make_unique<Impl>()) {
  Impl& i = *impl_;
  i.server.set_keep_alive_max_count(1);
  i.server.new_task_queue = [] { return new httplib::ThreadPool(16); };
  i.server.Put(R"(/api/v0/asks/(\d+)/)", [&i](const Request& q, Response& a) { i.create(q, a); });
  i.server.Post("/api/v0/bundles/", [&i](const Request& q, Response& a) { i.search(q, a); });
  i.server.Delete(R"(/api/v0/instances/(\d+)/)", [&i](const Request& q, Response& a) { i.destroy(q, a); });
  i.server.Delete("/api/v0/instances/", [&i](const Request& q, Response& a) { i.destroy_together(q, a); });
  i.server.Get(R"(/api/v0/instances/(\d+)/)", [&i](const Request& q, Response& a) { i.show(q, a); });
  i.server.Put(R"(/api/v0/instances/bid_price/(\d+)/)", [&i](const Request& q, Response& a) { i.bid(q, a); });
  i.server.Put(R"(/api/v0/instances/(\d+)/)", [&i](const Request& q, Response& a) { i.state(q, a); });
  i.server.Get("/api/v0/charges/", [&i](const Request& q, Response& a) { i.show_charges(q, a); });
  i.server.Get("/api/v0/users/current/", [&i](const Request& q, Response& a) {
    i.serve("user", false, q, a, [&] { Impl::answer(a, 200, {{"id", 7}, {"balance", 0}, {"credit", i.credit}}); });
  });
  i.server.Get("/api/v1/instances/", [&i](const Request& q, Response& a) { i.list(q, a); });
  i.server.Get("/api/v0/instances/", [](const Request&, Response& a) {
    Impl::answer(a, 410, {{"success", false}, {"error", "deprecated_endpoint"}});
  });
  i.port = i.server.bind_to_any_port("127.0.0.1");
  i.thread = std::thread([&i] { i.server.listen_after_bind(); });
  while (!i.server.is_running()) std::this_thread::yield();  // stop() would otherwise miss it
}

VastServer::~VastServer() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->is_ending = true;
  }
  impl_->ends.notify_all();
  impl_->server.stop();
  impl_->thread.join();
  while (!impl_->processes.empty()) impl_->end_instance(impl_->processes.begin()->first);
}

std::string VastServer::url() const { return "http://127.0.0.1:" + std::to_string(impl_->port); }

void VastServer::fault(VastFault fault) {
  const std::lock_guard lock(impl_->mutex);
  impl_->faults.push_back(std::move(fault));
}

void VastServer::remove_ask(std::int64_t ask) {
  const std::lock_guard lock(impl_->mutex);
  impl_->gone.insert(ask);
}

void VastServer::put(VastInstance instance) {
  const std::lock_guard lock(impl_->mutex);
  if (instance.id == 0) instance.id = impl_->next_id++;
  impl_->rented[instance.id] = instance;
}

void VastServer::change(std::int64_t id, const std::function<void(VastInstance&)>& change) {
  const std::lock_guard lock(impl_->mutex);
  if (const auto it = impl_->rented.find(id); it != impl_->rented.end()) change(it->second);
}

void VastServer::remove(std::int64_t id) {
  const std::lock_guard lock(impl_->mutex);
  impl_->rented.erase(id);
}

void VastServer::charge(VastCharge charge) {
  const std::lock_guard lock(impl_->mutex);
  impl_->charges.push_back(charge);
}

void VastServer::credit(double usd) {
  const std::lock_guard lock(impl_->mutex);
  impl_->credit = usd;
}

void VastServer::lists_nothing(bool on) {
  const std::lock_guard lock(impl_->mutex);
  impl_->lists_nothing = on;
}

void VastServer::expire_key() {
  const std::lock_guard lock(impl_->mutex);
  impl_->expired = true;
}

void VastServer::limit_rates(double speed) {
  const std::lock_guard lock(impl_->mutex);
  impl_->speed = speed;
}

void VastServer::run_containers_after(std::chrono::milliseconds time) {
  const std::lock_guard lock(impl_->mutex);
  impl_->containers_run_after = time;
}

void VastServer::fail_randomly(double probability, std::uint64_t seed) {
  const std::lock_guard lock(impl_->mutex);
  impl_->failure_probability = probability;
  impl_->random.seed(seed);
  impl_->fails_in_every_way = false;
}

void VastServer::fail_in_every_way(double probability, std::uint64_t seed, std::chrono::milliseconds hang) {
  const std::lock_guard lock(impl_->mutex);
  impl_->failure_probability = probability;
  impl_->random.seed(seed);
  impl_->fails_in_every_way = true;
  impl_->hang = hang;
}

void VastServer::on_rental(std::function<void(const VastInstance&, const std::string& body)> created,
                           std::function<void(std::int64_t)> destroyed) {
  const std::lock_guard lock(impl_->mutex);
  impl_->created = std::move(created);
  impl_->destroyed = std::move(destroyed);
}

void VastServer::on_log(std::function<void(const std::string& line)> call) {
  const std::lock_guard lock(impl_->mutex);
  impl_->log = std::move(call);
}

std::vector<VastRental> VastServer::rentals() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->rentals;
}

void VastServer::bill_rentals() {
  const std::lock_guard lock(impl_->mutex);
  impl_->bills_rentals = true;
}

void VastServer::destroys_several(bool on) {
  const std::lock_guard lock(impl_->mutex);
  impl_->takes_several = on;
}

void VastServer::keep_in_spite_of_success(std::int64_t id) {
  const std::lock_guard lock(impl_->mutex);
  impl_->destroyed_in_vain.insert(id);
}

void VastServer::offer(const std::string& rows) {
  const std::lock_guard lock(impl_->mutex);
  impl_->offers = json::parse(rows);
}

void VastServer::run_commands(const std::filesystem::path& folder, std::map<std::string, std::string> environment) {
  const std::lock_guard lock(impl_->mutex);
  impl_->commands = {folder, std::move(environment)};
}

std::vector<std::string> VastServer::searches() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->searches;
}

int VastServer::too_frequent() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->too_frequent;
}

void VastServer::at_points(std::function<void(int)> call) {
  const std::lock_guard lock(impl_->mutex);
  impl_->at_point = std::move(call);
  impl_->points = 0;
}

std::map<std::int64_t, VastInstance> VastServer::rented() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->rented;
}

int VastServer::count(const std::string& kind) const {
  const std::lock_guard lock(impl_->mutex);
  const auto it = impl_->counts.find(kind);
  return it == impl_->counts.end() ? 0 : it->second;
}

std::vector<std::string> VastServer::bodies() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->bodies;
}

std::string VastServer::all_headers() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->headers;
}

}  // namespace echoline::provisioner
