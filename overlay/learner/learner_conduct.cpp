// What the learner makes of what workers say of each other, and of how much they say (conduct.hpp has the rules).
#include <algorithm>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {

// ---- how much ----

// True: it may be heard. A worker that goes on although it is not is expelled: its Worker is gone then.
bool LearnerCore::within_budget(WorkerId id, MessageBudget::Kind kind, TimePoint now, std::size_t bytes) {
  MessageBudget& budget = conduct_.of(id, unix_ms(now)).budget;
  switch (budget.take(kind, now, bytes)) {
    case MessageBudget::Verdict::kTake:
      return true;
    case MessageBudget::Verdict::kDrop:
      return false;
    case MessageBudget::Verdict::kTooMuch:
      break;
  }
  if (!workers_.knows(id)) return false;
  conduct_.count_flood();
  expel(id, "it says too much: of " + budget.told(kind), now);
  return false;
}

// It may be a broken driver: it is not heard, and counted.
void LearnerCore::on_broken(WorkerId id, const std::string& what, TimePoint now) {
  if (!workers_.knows(id)) return;
  log::warn("worker {}: {}", id, what);
  if (conduct_.broken(id, unix_ms(now))) return expel(id, what + ", as often as never happens by chance", now);
  save(now);
}

// It speaks of somebody from whom it never had anything.
void LearnerCore::on_unfounded(Worker& accuser, WorkerId of, TimePoint now) {
  const WorkerId id = accuser.view.info.id;
  if (conduct_.of(id, unix_ms(now)).budget.unfounded(now) == MessageBudget::Verdict::kTooMuch)
    expel(id, fmt::format("it accuses workers that never sent it anything, the last one worker {}", of), now);
}

// ---- failed edges ----

// Both ends live, the edge does not. Where it cannot be opened, both try in turns; a parent that is silent
// to its child and to the learner loses its place; one that is silent to several children has no uplink to speak of;
// otherwise, after the third time, the two are put apart, and who fails with several others falls a role.
void LearnerCore::on_edge_failed(Worker& child, const EdgeFailed& failed, TimePoint now) {
  const WorkerId id = child.view.info.id;
  Worker* const parent = workers_.find(failed.parent);
  const Parent* const edge = child.place.edge_from(failed.parent);
  if (!child.place.may_accuse(failed.parent, now)) return on_unfounded(child, failed.parent, now);
  if (!parent || !edge) return;  // settled meanwhile
  log::warn("worker {} lost the connection to its parent {}: {}", id, failed.parent, failed.reason);
  if (failed.kind == EdgeTroubleKind::kSilent && now > parent->presence.heard_at() + 2 * config_.heartbeat) {
    parent->presence.on_complaint(now);
    if (parent->presence.is_silent_to_child(config_, now))
      silence(failed.parent, "it is silent to its child and to the learner", now);
    return;
  }
  if (failed.kind == EdgeTroubleKind::kUnreachable) {
    dial_back(*parent, now);
    if (other_end_dials(child, *parent, now)) return;
  }
  if (failed.kind == EdgeTroubleKind::kSilent && !conduct_.quarantined(id, unix_ms(now))) {
    const bool several = slow_hops_.is_silent_to_several(failed.parent, id, now);
    const auto planned = planned_rate(*edge, child, topology().copies_sent_by(failed.parent));
    if (several && planned) return on_slow_hop({{failed.parent, id}, BitRate{0}, *planned}, now);
  }
  const Conduct::Ruling ruling = conduct_.edge_failed(id, failed.parent, now, unix_ms(now));
  const bool dials = ruling == Conduct::Ruling::kNothing && reach_.parent_dials(failed.parent, id);
  if (dials && failed.kind != EdgeTroubleKind::kUnreachable && reach_.take_dial(child.view.info.data, now))
    send_control(parent->control, DialChild{id, child.view.info.data}, now);  // opens the connection again
  on_failed_edge(id, failed.parent, ruling, now);
}

// One end could not open the edge. Returns whether the parent tries for the first time, so that nothing has failed yet.
bool LearnerCore::other_end_dials(Worker& child, const Worker& parent, TimePoint now) {
  const MemberInfo& info = child.view.info;
  const WorkerId parent_id = parent.view.info.id;
  const Reachability::Turn turn = reach_.pass_turn(parent_id, info.id, info.data, now);
  if (!turn.changed) return false;
  for (Parent& p : child.place.assigned->parents)
    if (p.worker == parent_id) p.dials = turn.parent_dials;
  if (turn.parent_dials) send_control(parent.control, DialChild{info.id, info.data}, now);
  send_control(child.control, *child.place.assigned, now);
  return turn.first && turn.parent_dials;
}

void LearnerCore::on_failed_edge(WorkerId child, WorkerId parent, Conduct::Ruling ruling, TimePoint now) {
  switch (ruling) {
    case Conduct::Ruling::kNothing:
      return;
    case Conduct::Ruling::kPart:
      return put_apart(child, parent, now);
    case Conduct::Ruling::kParent:
      log::warn("worker {} is moved behind the others: it failed to forward", parent);
      return move_back(parent, now);
    case Conduct::Ruling::kChild:
      log::warn("worker {} is moved behind the others: its edges fail, whoever its parent is", child);
      return move_back(child, now);
  }
}

// ---- nothing comes ----

// Whether a parent has, by its own word, what this child lacks of what is to come over their edge.
bool LearnerCore::holds_back(const Parent& parent, const Worker& child) const {
  const Worker* sender = workers_.find(parent.worker);
  if (!sender || sender->presence.is_silent()) return false;
  const auto untold =
      [&](const auto& holding) {  // what leads on, and of which nothing has come, not even that it is there
        const PublicationKey& key = holding.first;
        const StoredPublication* stored = key.base && key.base == child.view.installed ? store_.find(key) : nullptr;
        return stored && !child.reported.progress.contains(stored->id);
      };
  if (std::any_of(sender->reported.holdings.begin(), sender->reported.holdings.end(), untold)) return true;
  return std::any_of(child.reported.progress.begin(), child.reported.progress.end(), [&](const auto& has) {
    const StoredPublication* stored = store_.find(has.first);
    if (!stored || (child.view.installed && stored->key().version <= *child.view.installed)) return false;
    const auto said = sender->reported.progress.find(has.first);
    const bool whole = sender->view.installed && *sender->view.installed >= stored->key().version;
    for (std::uint32_t s = 0; s < has.second.size(); ++s) {
      if (has.second.size() != topology().stripes() || !(parent.stripes >> s & 1)) continue;
      const std::uint32_t at_parent = whole ? stored->have.count_of({topology().stripes(), std::uint64_t{1} << s})
                                      : said != sender->reported.progress.end() && s < said->second.size()
                                          ? said->second[s]
                                          : 0;
      if (at_parent > has.second[s]) return true;
    }
    return false;
  });
}

// It has had nothing of use for long. That is as good as an edge that fails, with everyone who says that he holds what
// it lacks: with a helper, who was chosen for that, or with its parents. None of them is sent to help now: that would
// hide what does not come over the edge.
void LearnerCore::on_stalled(Worker& child, TimePoint now) {
  const WorkerId id = child.view.info.id;
  std::vector<WorkerId> idle;
  const auto helper = helpers_.helper_of(id);
  if (helper && *helper != kLearnerId) {
    idle.push_back(*helper);
  } else if (!helper) {
    for (const Parent& p : child.place.parents())
      if (p.worker != kLearnerId && holds_back(p, child)) idle.push_back(p.worker);
  }
  for (const WorkerId parent : idle) {
    log::warn("worker {} waits in vain for what its {} {} holds", id, helper ? "helper" : "parent", parent);
    helpers_.exclude(id, parent);
    on_failed_edge(id, parent, conduct_.edge_failed(id, parent, now, unix_ms(now), Conduct::kStallWeighs), now);
  }
}

// ---- bad chunks ----

// A chunk's proof failed, so whoever sent it over this edge had not checked it, or had changed it; or so it says.
void LearnerCore::on_poisoned(Worker& child, const Poisoned& poisoned, TimePoint now) {
  const WorkerId accuser = child.view.info.id;
  if (!child.place.may_accuse(poisoned.parent, now)) return on_unfounded(child, poisoned.parent, now);
  if (poisoned.parent == kLearnerId) return;
  log::warn("worker {} -> {}: bad chunk {}", poisoned.parent, accuser, poisoned.index);
  const auto here = [this](WorkerId id) { return workers_.contains(id); };
  switch (conduct_.bad_chunk(accuser, poisoned.parent, unix_ms(now), here)) {
    case Conduct::Ruling::kNothing:
      return;
    case Conduct::Ruling::kPart:
      return put_apart(accuser, poisoned.parent, now);
    case Conduct::Ruling::kParent:
      return on_quarantined(poisoned.parent, "several workers got bad chunks from it", now);
    case Conduct::Ruling::kChild:
      return on_quarantined(accuser, "it says of many that they forward bad chunks, and nobody else does", now);
  }
}

// Nobody knows which of the two it was: neither is judged, and they have nothing to do with each other any more.
void LearnerCore::put_apart(WorkerId child, WorkerId parent, TimePoint now) {
  log::warn("workers {} and {} are put apart: what one says of the other is not proven", parent, child);
  set_topology(topology(), now);
  save(now);
}

void LearnerCore::on_quarantined(WorkerId id, const std::string& why, TimePoint now) {
  log::warn("worker {} is quarantined, it forwards nothing any more: {}", id, why);
  save(now);
  if (workers_.contains(id)) move_back(id, now);
}

// ---- with time ----

void LearnerCore::watch_conduct(TimePoint now) {
  std::vector<WorkerId> try_again;
  for (const auto& [id, worker] : workers_)
    if (conduct_.tries_again(id, unix_ms(now))) try_again.push_back(id);
  for (const WorkerId id : try_again) move_back(id, now);
  if (!conduct_.take_prune(now)) return;
  const auto present = workers_.all();
  conduct_.prune({present.begin(), present.end()}, unix_ms(now));
}

// Deliveries to others are what a role is won back by.
void LearnerCore::credit(WorkerId sender, WorkerId receiver, TimePoint now) {
  if (sender == kLearnerId || !conduct_.delivered(sender, receiver, unix_ms(now))) return;
  const auto& leaves = topology().leaves_only;
  if (workers_.contains(sender) && std::binary_search(leaves.begin(), leaves.end(), sender))
    move_back(sender, now);  // it may forward again
}

}  // namespace echoline::overlay
