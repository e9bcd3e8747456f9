// Implements OpenAiServer with cpp-httplib.
#include "openai_server.hpp"

#include <fmt/format.h>
#include <httplib.h>

#include <condition_variable>
#include <list>
#include <mutex>
#include <set>
#include <thread>

#include "tests/base/thread_each.hpp"

namespace echoline {
namespace {

using httplib::Request;
using httplib::Response;
using nlohmann::json;

void put(Response& response, const json& body, int status = 200) {
  response.status = status;
  response.set_content(body.dump(), "application/json");
}

void refuse(Response& response, int status, const std::string& message, const json& code = nullptr,
            const json& param = nullptr) {
  put(response,
      {{"error", {{"message", message}, {"type", "invalid_request_error"}, {"param", param}, {"code", code}}}}, status);
}

}  // namespace

struct OpenAiServer::Impl {
  OpenAiServerOptions options;
  httplib::Server server;
  std::thread listener;
  int port = 0;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::list<OpenAiFault> faults;
  int requests = 0, requests_inside = 0, requests_inside_max = 0;
  bool stopping = false;
  json last;

  std::optional<OpenAiFault> take_fault() {
    if (faults.empty()) return std::nullopt;
    const OpenAiFault fault = faults.front();
    if (--faults.front().times == 0) faults.pop_front();
    return fault;
  }

  // Writes the answer with this fault. False if the ordinary answer follows.
  bool write_faulty_answer(const OpenAiFault& fault, Response& response) {
    const auto broken_off = [&](const std::string& text, std::size_t promised) {
      response.set_content_provider(promised, "application/json",
                                    [text](std::size_t, std::size_t, httplib::DataSink& sink) {
                                      sink.write(text.data(), text.size());
                                      return false;
                                    });
    };
    if (fault.retry_after_s > 0) response.set_header("Retry-After", std::to_string(fault.retry_after_s));
    if (fault.what == "status") {
      if (fault.body.empty())
        refuse(response, fault.status, "it is not so well");
      else
        response.status = fault.status, response.set_content(fault.body, "application/json");
    } else if (fault.what == "html") {
      response.set_content("<html>502 Bad Gateway</html>", "text/html");
    } else if (fault.what == "disconnect") {
      broken_off(R"({"id": "cmpl-1", "choi)", 1000);
    } else if (fault.what == "half") {
      response.set_content(R"({"id": "cmpl-1", "choices": [{"index": 0, "mess)", "application/json");
    } else if (fault.what == "no_choices") {
      put(response, {{"id", "cmpl-1"}, {"object", "chat.completion"}, {"choices", json::array()}});
    } else if (fault.what == "null_reason") {
      put(response, {{"choices",
                      {{{"index", 0},
                        {"message", {{"role", "assistant"}, {"content", "4"}}},
                        {"text", "4"},
                        {"finish_reason", nullptr}}}}});
    } else if (fault.what == "error") {
      put(response, {{"error", {{"message", "upstream failed"}, {"code", 502}}}});
    } else {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, fault.hangs, [this] { return stopping; });
      return false;
    }
    return true;
  }

  void serve(const Request& request, Response& response, bool chat) {
    std::optional<OpenAiFault> fault;
    {
      const std::lock_guard lock(mutex);
      ++requests;
      last = json::parse(request.body, nullptr, false);
      fault = take_fault();
    }
    if (fault && write_faulty_answer(*fault, response)) return;
    if (!options.key.empty() && request.get_header_value("Authorization") != "Bearer " + options.key)
      return refuse(response, 401,
                    "Incorrect API key provided. You can find your API key at https://platform.openai.com.",
                    "invalid_api_key");
    const json body = json::parse(request.body, nullptr, false);
    if (!body.is_object()) return refuse(response, 400, "We could not parse the JSON body of your request.");
    static const std::set<std::string> kKnown = {"model",       "messages",   "prompt",
                                                 "temperature", "top_p",      "stream",
                                                 "n",           "max_tokens", "max_completion_tokens",
                                                 "seed",        "stop",       "chat_template_kwargs"};
    for (const auto& [name, value] : body.items())
      if (!kKnown.contains(name))
        return refuse(response, 400, "Unrecognized request argument supplied: " + name, nullptr, name);
    if (body.value("model", "") != options.model)
      return refuse(
          response, 404,
          fmt::format("The model `{}` does not exist or you do not have access to it.", body.value("model", "")),
          "model_not_found");
    if (options.wants_completion_tokens && body.contains("max_tokens"))
      return refuse(
          response, 400,
          "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
          "unsupported_parameter", "max_tokens");
    std::string text;
    if (chat) {
      if (!body.contains("messages") || body["messages"].empty())
        return refuse(response, 400, "Missing required parameter: 'messages'.", nullptr, "messages");
      for (const json& message : body["messages"]) text = message.at("content");
    } else {
      if (!body.contains("prompt")) return refuse(response, 400, "you must provide a prompt", nullptr, "prompt");
      text = body["prompt"];
    }
    if (text.size() > options.context_max)
      return refuse(response, 400,
                    fmt::format("This model's maximum context length is {} tokens.", options.context_max),
                    "context_length_exceeded", "messages");
    std::string answer_text = options.says(text, body);
    const std::size_t tokens_max =
        body.value(options.wants_completion_tokens ? "max_completion_tokens" : "max_tokens", std::size_t{16});
    const bool cut = answer_text.size() > tokens_max;
    answer_text = answer_text.substr(0, tokens_max);
    json choice = {{"index", 0}, {"logprobs", nullptr}, {"finish_reason", cut ? "length" : "stop"}};
    if (chat)
      choice["message"] = {{"role", "assistant"}, {"content", answer_text}, {"refusal", nullptr}};
    else
      choice["text"] = answer_text;
    put(response, {{"id", "cmpl-1"},
                   {"object", chat ? "chat.completion" : "text_completion"},
                   {"created", 1},
                   {"model", options.model},
                   {"choices", json::array({choice})},
                   {"usage",
                    {{"prompt_tokens", text.size()},
                     {"completion_tokens", answer_text.size()},
                     {"total_tokens", text.size() + answer_text.size()}}}});
  }
};

OpenAiServer::OpenAiServer(OpenAiServerOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
  Impl* const impl = impl_.get();
  impl->server.new_task_queue = [] { return new ThreadEach; };
  for (const bool chat : {true, false})
    impl->server.Post(chat ? "/v1/chat/completions" : "/v1/completions",
                      [impl, chat](const Request& request, Response& response) {
                        {
                          const std::lock_guard lock(impl->mutex);
                          impl->requests_inside_max = std::max(impl->requests_inside_max, ++impl->requests_inside);
                        }
                        impl->serve(request, response, chat);
                        const std::lock_guard lock(impl->mutex);
                        --impl->requests_inside;
                      });
  impl->server.Get("/v1/models", [impl](const Request&, Response& response) {
    put(response, {{"object", "list"}, {"data", {{{"id", impl->options.model}, {"object", "model"}}}}});
  });
  impl->port = impl->server.bind_to_any_port("127.0.0.1");
  impl->listener = std::thread([impl] { impl->server.listen_after_bind(); });
  while (!impl->server.is_running()) std::this_thread::yield();
}

OpenAiServer::~OpenAiServer() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  impl_->server.stop();
  impl_->listener.join();
}

std::string OpenAiServer::url() const { return fmt::format("http://127.0.0.1:{}/v1", impl_->port); }
void OpenAiServer::fault(OpenAiFault fault) {
  const std::lock_guard lock(impl_->mutex);
  impl_->faults.push_back(std::move(fault));
}
int OpenAiServer::requests() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->requests;
}
int OpenAiServer::requests_at_once_max() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->requests_inside_max;
}
json OpenAiServer::last() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->last;
}

}  // namespace echoline
