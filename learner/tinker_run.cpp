// Serves a Tinker client. The service calls it on the main thread.
#include "learner/tinker_run.hpp"

#include <algorithm>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "learner/external/source.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;
using tinker::Answer;
using tinker::json_answer;

constexpr Duration kPoll = std::chrono::milliseconds(200);  // how often a wait checks whether the run must stop
constexpr Duration kSamplesPoll = std::chrono::milliseconds(20);
constexpr std::size_t kStatesMax = 1024;  // saved by clients in one run
constexpr const char* kStatesFolder = "client-states";

std::string base_model_name(const RunConfig& config) {
  if (config.model.preset) return *config.model.preset;
  std::filesystem::path folder = *config.model.path;
  if (folder.filename().empty()) folder = folder.parent_path();
  return folder.filename().string();
}

bool adapts(const model::AdapterConfig& adapter, std::initializer_list<std::string_view> layers) {
  return std::any_of(adapter.targets.begin(), adapter.targets.end(), [&](const std::string& target) {
    return std::find(layers.begin(), layers.end(), target.substr(target.rfind('.') + 1)) != layers.end();
  });
}

}  // namespace

TinkerRun::TinkerRun(const RunHost& run, const RunTask& task)
    : run_(run),
      task_(task),
      base_model_(base_model_name(run.config)),
      link_(run.clock),
      samples_({.vocab_size = task.files.config.vocab_size}, task.phrasing.tokenizer(), run.clock.unix_seconds(),
               [this](const std::string& id, Result<std::vector<Sample>> samples) {
                 if (samples)
                   link_.futures().answer(id, tinker::sample_answer(*samples));
                 else
                   link_.futures().fail(id, samples.error());
               }) {}

TinkerRun::~TinkerRun() { stop("the learner has ended"); }

Status TinkerRun::listen(const RunRecord& record, std::function<std::size_t()> workers) {
  const model::ModelConfig& model = task_.files.config;
  tinker::ServerOptions options;
  options.listen = run_.config.learner.api;
  options.base_model = base_model_;
  options.tokenizer = std::filesystem::absolute(record.folder() / "model").string();
  options.adapter_rank = model.adapter->rank;
  options.adapts_mlp = adapts(*model.adapter, {"gate_proj", "up_proj", "down_proj"});
  options.adapts_attention = adapts(*model.adapter, {"q_proj", "k_proj", "v_proj", "o_proj"});
  options.adapts_unembedding = adapts(*model.adapter, {"lm_head"});
  options.limits = {.response_tokens_max = static_cast<std::uint32_t>(run_.config.rollout.response_tokens_max),
                    .positions_max = model.positions_max,
                    .vocab_size = model.vocab_size};
  options.ending_tokens = task_.phrasing.eos();
  options.workers = std::move(workers);
  ECHO_ASSIGN(server_, tinker::Server::start(std::move(options), link_, samples_));
  address_file_ = record.folder() / kTrainerAddressFile;
  ECHO_TRY(write_private_file_atomic(address_file_, json_text(server_->address(), 2) + "\n"));  // it has the key
  log::info("a Tinker client can connect: {} has TINKER_BASE_URL and TINKER_API_KEY", address_file_.string());
  return ok();
}

void TinkerRun::stop(const std::string& reason) {
  samples_.stop(reason);
  link_.stop(reason);
  server_.reset();
  std::error_code ignored;
  if (!address_file_.empty()) std::filesystem::remove(address_file_, ignored);
}

bool TinkerRun::is_last_step_done(const Parts& parts) const { return parts.journal.step() >= run_.config.run.steps; }

Status TinkerRun::keep_alive(const Parts& parts, const std::string& phase) {
  ECHO_TRY(parts.journal.record().check_folder());
  parts.write_status(phase);
  return parts.fleet.check_budget();
}

Result<bool> TinkerRun::serve(const Parts& parts) {
  const auto checkpoint = [&] {
    return parts.journal.persist("checkpoints", [&] { return parts.policy_source.checkpoint(); });
  };
  ECHO_ASSIGN(bool goes_on, publish(parts));
  step_began_at_ = run_.clock.now();
  while (goes_on && !run_.stop && !(is_last_step_done(parts) && !link_.has_live_session())) {
    if (Status alive = keep_alive(parts, "waiting for the Tinker client"); !alive) {
      ECHO_TRY(checkpoint());
      return std::move(alive).error();
    }
    std::optional<tinker::DueOperation> due = link_.next_operation(kPoll);
    if (!due) continue;
    if (Status done = execute(parts, *std::move(due)); !done) {
      if (Status saved = checkpoint(); !saved) log::warn("{}", saved.error().message());
      return std::move(done).error();
    }
  }
  ECHO_TRY(checkpoint());
  stop(is_last_step_done(parts) ? "the run has ended: its steps are done" : "the run was stopped");
  return goes_on && is_last_step_done(parts);
}

// An operation's own error goes to the client. Errors that end the run are in run_error_.
Status TinkerRun::execute(const Parts& parts, tinker::DueOperation due) {
  const auto run_operation = [&](const auto& operation) -> Result<Answer> {
    using Kind = std::decay_t<decltype(operation)>;
    if constexpr (std::is_same_v<Kind, tinker::CreateModel>) return create_model(parts, due, operation);
    if constexpr (std::is_same_v<Kind, DatumBatch>) return train(parts, operation);
    if constexpr (std::is_same_v<Kind, tinker::OptimStep>) return optim_step(parts, operation);
    if constexpr (std::is_same_v<Kind, tinker::SaveWeights>) return save_weights(parts, due, operation);
    if constexpr (std::is_same_v<Kind, tinker::LoadWeights>) return load_weights(parts, due, operation);
    if constexpr (std::is_same_v<Kind, tinker::SaveForSampler>) return save_for_sampler(parts, due, operation);
    if constexpr (std::is_same_v<Kind, tinker::Refused>) return Error{Code::kInvalid, "", operation.reason};
  };
  Result<Answer> answer = std::visit(run_operation, due.operation);
  if (answer)
    link_.futures().answer(due.id, *std::move(answer));
  else
    link_.futures().fail(due.id, answer.error());
  return run_error_ ? Status(*run_error_) : ok();
}

Result<DatumTrainer*> TinkerRun::trainer(const Parts& parts) const {
  DatumTrainer* trainer = parts.policy_source.datum_trainer();
  if (trainer == nullptr)
    return fail(Code::kUnavailable, "train", "this echoline was built without libtorch, and so cannot train");
  return trainer;
}

Result<Answer> TinkerRun::create_model(const Parts& parts, const tinker::DueOperation& due,
                                       const tinker::CreateModel& create) {
  ECHO_ASSIGN(DatumTrainer * datum_trainer, trainer(parts));
  // The first model has the adapter with which the run began; it is untrained.
  if (create.seed || parts.journal.step() > 0) {
    ECHO_TRY(datum_trainer->begin_adapter(create.seed));
    parts.journal.set_step(parts.policy_source.steps());
  }
  link_.set_model(due.model, due.session);
  since_step_ = {};
  parts.journal.record().append_event("client_model", {{"model", due.model}, {"step", parts.journal.step()}});
  log::info("a Tinker client trains model {}", due.model);
  return json_answer({{"type", "create_model"}, {"model_id", due.model}});
}

Result<Answer> TinkerRun::train(const Parts& parts, const DatumBatch& batch) {
  ECHO_ASSIGN(DatumTrainer * datum_trainer, trainer(parts));
  parts.write_status("training");
  const TimePoint began_at = run_.clock.now();
  ECHO_ASSIGN(const DatumResult result, datum_trainer->forward_backward(batch));
  since_step_.train_time += run_.clock.now() - began_at;
  if (!batch.forward_only) {
    since_step_.loss += result.loss_sum;
    since_step_.examples += batch.data.size();
  }
  return tinker::forward_backward_answer(batch, result);
}

Result<Answer> TinkerRun::optim_step(const Parts& parts, const tinker::OptimStep& step) {
  ECHO_ASSIGN(DatumTrainer * datum_trainer, trainer(parts));
  RunJournal& journal = parts.journal;
  if (is_last_step_done(parts))
    return fail(Code::kInvalid, "optim_step", "the run's {} steps are done: run.steps of the run file",
                run_.config.run.steps);
  const TimePoint began_at = run_.clock.now();
  ECHO_ASSIGN(const AdamReport report, datum_trainer->optim_step(step.adam));
  if (!report.applied)
    return fail(Code::kCorrupt, "optim_step",
                "the gradient is not finite, so the weights are unchanged and the gradient is dropped");
  const TimePoint ended_at = run_.clock.now();
  since_step_.train_time += ended_at - began_at;
  journal.set_step(parts.policy_source.steps());
  json row = {{"step", journal.step()},
              {"loss", since_step_.loss},
              {"examples", since_step_.examples},
              {"gradient_norm", report.gradient_norm},
              {"learning_rate", step.adam.learning_rate},
              {"train_seconds", seconds(since_step_.train_time)},
              {"wait_seconds", seconds(ended_at - step_began_at_ - since_step_.train_time)},
              {"step_seconds", seconds(ended_at - step_began_at_)}};
  journal.record().append_metric("step", std::move(row));
  if (provisioner::FleetDriver* fleet = parts.fleet.driver())
    fleet->on_step_measured(
        {.step_time = ended_at - step_began_at_, .steps_left = run_.config.run.steps - journal.step()});
  since_step_ = {};
  step_began_at_ = ended_at;
  const auto finish_step = [&]() -> Status {
    if (journal.step() % run_.config.learner.checkpoint_every == 0)
      ECHO_TRY(journal.persist("checkpoints", [&] { return parts.policy_source.checkpoint(); }));
    ECHO_TRY(parts.policy_source.on_step_end());
    return journal.persist("metrics and events", [&] { return journal.record().write_pending_rows(); });
  };
  if (Status finished = finish_step(); !finished) run_error_ = finished.error();
  return json_answer({{"metrics", {{"gradient_norm:mean", report.gradient_norm}}}});
}

std::filesystem::path TinkerRun::state_folder(const Parts& parts, const std::string& model,
                                              const std::string& name) const {
  std::string folder = model;  // its colons would be misread in lists of paths
  std::replace(folder.begin(), folder.end(), ':', '-');
  return parts.journal.record().folder() / kStatesFolder / folder / name;
}

Result<Answer> TinkerRun::save_weights(const Parts& parts, const tinker::DueOperation& due,
                                       const tinker::SaveWeights& save) {
  ECHO_ASSIGN(DatumTrainer * datum_trainer, trainer(parts));
  const std::filesystem::path folder = state_folder(parts, due.model, save.name);
  std::error_code error;
  const bool exists = std::filesystem::exists(folder, error);
  if (exists && !save.overwrite)
    return fail(Code::kInvalid, "save_weights", "'{}' exists: choose another name, or pass overwrite=True", save.name);
  std::size_t states = 0;
  for (std::filesystem::directory_iterator it(folder.parent_path(), error), end; !error && it != end;
       it.increment(error))
    ++states;
  if (!exists && states >= kStatesMax)
    return fail(Code::kExhausted, "save_weights", "{} states are saved in {}, which is the limit: delete some", states,
                folder.parent_path().string());
  ECHO_TRY(make_folders(folder.parent_path()));
  ECHO_TRY(datum_trainer->save_state(folder));
  return json_answer({{"type", "save_weights"}, {"path", tinker::to_text({due.model, save.name}, "weights")}});
}

Result<Answer> TinkerRun::load_weights(const Parts& parts, const tinker::DueOperation& due,
                                       const tinker::LoadWeights& load) {
  ECHO_ASSIGN(DatumTrainer * datum_trainer, trainer(parts));
  ECHO_ASSIGN(const tinker::CheckpointPath path, tinker::parse_path(load.path, "weights"));
  const std::filesystem::path folder = state_folder(parts, path.model, path.name);
  std::error_code ignored;
  if (path.model.find('/') != std::string::npos || path.model.find("..") != std::string::npos ||
      !std::filesystem::exists(folder, ignored))
    return fail(Code::kNotFound, "load_weights", "'{}' was not saved in this run", printable(load.path));
  ECHO_TRY(datum_trainer->load_state(folder, load.optimizer));
  parts.journal.set_step(parts.policy_source.steps());
  const auto current = link_.model();
  if (!current || current->id != due.model) link_.set_model(due.model, due.session);
  return json_answer({{"type", "load_weights"}, {"path", load.path}, {"model_id", due.model}});
}

Result<bool> TinkerRun::publish(const Parts& parts) {
  const Version version{parts.journal.step()};
  if (published_ == version) return true;
  // Workers hold one version, so requests for earlier ones are answered first.
  while (samples_.awaits_older(version)) {
    if (run_.stop) return false;
    ECHO_TRY(keep_alive(parts, "waiting for samples of the version before"));
    std::this_thread::sleep_for(kSamplesPoll);
  }
  ECHO_ASSIGN(delta::SharedState policy, parts.policy_source.policy(version));
  if (!policy) return false;
  parts.publisher.publish(version, std::move(policy));
  for (;;) {
    ECHO_ASSIGN(const bool is_published, parts.publisher.wait_until_published(kPoll));
    if (is_published) break;
    if (run_.stop) return false;
    ECHO_TRY(keep_alive(parts, "publishing"));
  }
  published_ = version;
  samples_.replace_versions_before(version);
  link_.set_published(version);
  return true;
}

Result<Answer> TinkerRun::save_for_sampler(const Parts& parts, const tinker::DueOperation& due,
                                           const tinker::SaveForSampler& save) {
  const Result<bool> is_published = publish(parts);
  if (!is_published) {
    run_error_ = is_published.error();
    return *run_error_;
  }
  if (!*is_published) return fail(Code::kUnavailable, "save_weights_for_sampler", "the run is being stopped");
  json body{{"type", "save_weights_for_sampler"}};
  if (!save.name.empty()) body["path"] = link_.add_sampler_path(due.model, save.name, *published_);
  if (save.session_number)
    body["sampling_session_id"] = link_.add_sampler(due.session, *save.session_number, *published_, save.follows_newer);
  return json_answer(body);
}

}  // namespace echoline::learner
