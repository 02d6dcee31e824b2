// The round that is open on a server of averaging rounds: its members, the
// values and turns of workers that are not yet members, and the workers that it
// waits for. Its caller holds a lock. Does not depend on TensorFlow.
#ifndef WRAPOPT_CC_PROTOCOLS_OPEN_ROUND_H_
#define WRAPOPT_CC_PROTOCOLS_OPEN_ROUND_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/protocols/arrivals.h"
#include "cc/protocols/round_waits.h"
#include "cc/protocols/rounds_status.h"
#include "cc/protocols/workers.h"

namespace wrapopt {

inline constexpr int64_t kLastRound = std::numeric_limits<int64_t>::max();

template <class Value>
class OpenRound {
 public:
  // A worker whose values are part of the round. One of weight 0 has none: the
  // round does not wait for it, and its mean is that of the others.
  struct Member {
    double weight = 1;
    std::vector<Value> values;
  };

  // The caller frees them after it releases its lock, since freeing gigabytes
  // takes time.
  using Dropped = std::vector<std::vector<Value>>;

  OpenRound(std::string subject, int64_t num_workers)
      : subject_(std::move(subject)), num_workers_(num_workers) {}

  const std::string& subject() const { return subject_; }
  int64_t num_workers() const { return num_workers_; }

  Place place() const { return {open_, generation_}; }
  bool closed() const { return closed_; }

  // Round -1 of a later generation than the first gives no turns: its center is
  // being written.
  bool is_stopped() const { return open_ < 0 && generation_ > 0; }

  Known KnownNow() const {
    return {place(), closed_, -1, turns_, Workers(), WithoutValues()};
  }
  // With the newest members only: servers are told often, and of all members
  // when the round ends.
  Known KnownOfNewest() const {
    return {place(), closed_, -1, turns_, newest_, {}};
  }

  // Whether the round at a place is closed, and then its members, if it is open
  // here or the last that ended.
  bool IsClosed(const Place& at, Known* known) const {
    const bool is_open = at == place();
    if (is_stopped() || (is_open && !closed_)) return false;
    *known = is_open ? KnownAtEnd(at) : at == ended_.place ? ended_ : Known{at};
    known->closed = true;
    return true;
  }

  // Workers.

  // Makes a worker known by its name, as Rounds::Join().
  RoundsStatus Join(const std::string& worker, int64_t process, bool resumes,
                    int64_t* workers) {
    if (!resumes && !processes_.Has(worker) &&
        processes_.size() >= num_workers_) {
      return TooMany(worker, kNewJob);
    }
    if (!resumes && processes_.IsTaken(worker, process)) {
      return RoundsStatus::InvalidArgument(
          Text("worker ", InQuotes(worker), " of ", subject_, " is another ",
               "process already, and round ", open_, " is open", kNewJob));
    }
    const RoundsStatus status = NoteProcess(worker, process);
    *workers = processes_.size() - processes_.num_left();
    return status;
  }

  // Notes a worker that wants a turn: it will come to the round, however long
  // it takes to train.
  RoundsStatus Enter(const std::string& worker, int64_t process) {
    const RoundsStatus status = NoteProcess(worker, process);
    if (status.ok()) Expect(worker);
    return status;
  }

  void Expect(const std::string& worker) { expected_.Add(worker); }

  // A missing worker is not expected again until it enters.
  void ExpectMembers() { expected_.Only(Workers()); }

  // As Processes::Leave().
  bool Leave(const std::string& worker, int64_t process) {
    return processes_.Leave(worker, process);
  }

  const std::set<std::string>& left() const { return processes_.left(); }

  // Turns.

  // Whether a worker that is no member may become one.
  bool Wants(const std::string& worker) const {
    return !closed_ && members_.count(worker) == 0;
  }

  size_t num_turns() const { return turns_.alive.size(); }
  bool IsAlive(int64_t turn) const { return turns_.alive.count(turn) > 0; }

  int64_t BeginTurn() {
    turns_.newest = ++last_turn_;
    turns_.alive.insert(last_turn_);
    return last_turn_;
  }

  void EndTurn(int64_t turn, Dropped* dropped) {
    turns_.alive.erase(turn);
    arrivals_.DropOver(turns_, generation_, dropped);
  }

  // Values.

  // The number of workers whose values are no members'.
  int64_t staged() const { return arrivals_.size(); }

  // As Rounds::Stage().
  bool Stage(const std::string& worker, const Known& known, double weight,
             int64_t count, int64_t first, std::vector<Value> values,
             Dropped* dropped) {
    Follow(known, dropped);
    if (known.place.generation <= generation_ &&
        (known.place != place() || !Wants(worker) ||
         turns_.is_over(known.turn))) {
      return false;
    }
    arrivals_.Add(worker, known.place, known.turn, weight, count, first,
                  std::move(values), dropped);
    return true;
  }

  // Makes a worker that has a turn a member.
  bool Accept(const std::string& worker, const Known& told) {
    const bool accepted = told.place == place() && !closed_ &&
                          IsAlive(told.turn) && HasStaged(worker, told.place) &&
                          arrivals_.Find(worker)->turn == told.turn;
    if (accepted) Admit(worker);
    return accepted;
  }

  // Tells a server that does not lead what the lead knows. False if another
  // place is open.
  bool Follow(const Known& known, Dropped* dropped) {
    if (known.place != place()) return false;
    for (const std::string& worker : known.workers) {
      if (HasStaged(worker, known.place) && members_.count(worker) == 0) {
        Admit(worker);
      }
    }
    if (known.turns.newest > turns_.newest) {
      turns_ = known.turns;
      arrivals_.DropOver(turns_, generation_, dropped);
    }
    return true;
  }

  // The values that members have brought since the last call.
  std::vector<Member> TakeValues() {
    std::vector<Member> taken;
    for (auto& [worker, member] : members_) {
      if (member.values.empty()) continue;
      taken.push_back({member.weight, std::move(member.values)});
      member.values.clear();
    }
    return taken;
  }

  // Whether a member's values count.
  bool HasValues() const { return WithoutValues().size() < members_.size(); }

  // The end.

  // The number of workers that the round does not wait for.
  int64_t came() const { return members_.size() + absent(); }

  // Whether `came` workers are enough for a wait.
  bool Suffice(int64_t came, int64_t min_workers) const {
    return !members_.empty() && came >= min_workers;
  }

  // Whether the round waits for no other worker.
  bool HaveAllCome(int64_t came) const {
    return came >= num_workers_ ||
           expected_.HaveCome([this](const std::string& name) {
             return members_.count(name) > 0 || left().count(name) > 0;
           });
  }

  // Returns a warning if workers are missing, or "".
  std::string Close() {
    closed_ = true;
    if (came() >= num_workers_) {
      expected_.All();
      return "";
    }
    return Text("Round ", open_, " of ", subject_, " is made of ",
                members_.size(), " of ", num_workers_ - absent(), " workers: ",
                Names(), ".");
  }

  // As Rounds::CheckClosed().
  RoundsStatus CheckClosed(const Known& known, bool* is_open,
                           Dropped* dropped) {
    *is_open = Follow(known, dropped);
    if (!*is_open || (known.closed && known.workers == Workers())) {
      return RoundsStatus();
    }
    return RoundsStatus::FailedPrecondition(Text(
        "round ", open_, " of ", subject_, " must ",
        known.closed ? Text("have the values of ", known.workers.size(),
                            " workers")
                     : "be closed",
        " before it ends, got values of ", Names()));
  }

  // Opens the next round.
  RoundsStatus Next(Dropped* dropped) {
    if (open_ == kLastRound) {
      return RoundsStatus::FailedPrecondition(Text(
          subject_, " cannot continue after round ", kLastRound,
          ", the last: use another shared_name"));
    }
    Open(open_ + 1, dropped);
    return RoundsStatus();
  }

  // Begins a generation, as Rounds::Restore().
  RoundsStatus Restore(const std::string& worker, int64_t from,
                       const Place& at, bool needs_values,
                       std::vector<Value>* values, bool* restored,
                       Dropped* dropped) {
    *restored = from == generation_ && at.generation > from;
    if (!*restored) return RoundsStatus();
    if (HasStaged(worker, at)) {
      *values = arrivals_.Take(worker).values;
    } else if (needs_values && at.round != open_) {
      return RoundsStatus::FailedPrecondition(Text(
          "worker ", InQuotes(worker), " must send a center before round ",
          at.round, " of ", subject_, " begins, got none; round ", open_,
          " is open"));
    }
    generation_ = at.generation;
    turns_.newest = last_turn_;  // The lead may have been restarted.
    expected_.All();
    Open(at.round, dropped);
    return RoundsStatus();
  }

  // The errors of waits.

  RoundsStatus Cancelled(const Place& at) const {
    return RoundsStatus::Cancelled(
        Text("the wait for round ", at.round, " of ", subject_,
             " was cancelled: its step or session has ended"));
  }

  RoundsStatus TimedOut(const RoundWait& wait) const {
    const double limit = wait.timeout_secs;
    const std::string within =
        Text(" within ", limit < 10 ? limit : std::round(limit), " seconds");
    if (is_stopped()) {
      return RoundsStatus::DeadlineExceeded(
          Text(subject_, " are stopped, and the chief has begun none", within,
               ": start the chief, or wait longer"));
    }
    return RoundsStatus::DeadlineExceeded(
        Text("round ", open_, " of ", subject_,
             wait.what == RoundWait::For::kClose
                 ? Text(" got values of ", members_.size(), " workers",
                        within, " (", Names(), "), but needs ",
                        std::max<int64_t>(wait.min_workers - absent(), 1),
                        " of ", num_workers_ - absent())
                 : Text(" gave no turn",
                        wait.what == RoundWait::For::kRead ? " to read" : "",
                        within),
             ": restart the others, wait longer, or reduce min_workers"));
  }

  RoundsStatus Gone() const {
    return RoundsStatus::Aborted(Text(subject_, " were deleted"));
  }

 private:
  // The ends of errors about names: they say what to do.
  static constexpr char kUniqueName[] =
      ": give each worker a unique name that does not change, or correct "
      "num_workers";
  static constexpr char kNewJob[] =
      ": a restarted worker passes resume=True; a new job has another name, or "
      "begins after the old one is dropped";

  Known KnownAtEnd(const Place& at) const {
    Known known{at};
    known.workers = Workers();
    known.without_values = WithoutValues();
    return known;
  }

  bool HasStaged(const std::string& worker, const Place& at) const {
    const auto* const staged = arrivals_.Find(worker);
    return staged != nullptr && staged->place == at && staged->is_complete();
  }

  void Admit(const std::string& worker) {
    auto staged = arrivals_.Take(worker);
    members_[worker] = {staged.weight, std::move(staged.values)};
    constexpr size_t kMostTold = 16;
    if (newest_.size() == kMostTold) newest_.erase(newest_.begin());
    newest_.push_back(worker);
  }

  void Open(int64_t round, Dropped* dropped) {
    ended_ = KnownAtEnd({round - 1, generation_});
    open_ = round;
    closed_ = false;
    for (auto& [worker, member] : members_) {
      dropped->push_back(std::move(member.values));
    }
    members_.clear();
    newest_.clear();
    arrivals_.DropAll(dropped);
    turns_.alive.clear();
  }

  // The number of workers that have left and are no members.
  int64_t absent() const {
    return std::count_if(left().begin(), left().end(),
                         [this](const std::string& worker) {
                           return members_.count(worker) == 0;
                         });
  }

  // Notes that a process uses a worker's name.
  RoundsStatus NoteProcess(const std::string& worker, int64_t process) {
    if (processes_.IsFull(worker, num_workers_)) {
      return TooMany(worker, kUniqueName);
    }
    if (processes_.IsCurrent(worker, process)) return RoundsStatus();
    return RoundsStatus::InvalidArgument(Text(
        "worker ", InQuotes(worker), " of ", subject_, " is another ",
        "process now: give each worker a unique name"));
  }

  RoundsStatus TooMany(const std::string& worker,
                       const std::string& what_to_do) const {
    return RoundsStatus::InvalidArgument(Text(
        subject_, " have num_workers = ", num_workers_, ", but ",
        InQuotes(worker), " came to round ", open_, " after ",
        InQuotes(processes_.Names()), what_to_do));
  }

  std::vector<std::string> Workers() const { return Keys(members_); }
  std::vector<std::string> WithoutValues() const {
    std::vector<std::string> workers;
    for (const auto& [worker, member] : members_) {
      if (member.weight == 0) workers.push_back(worker);
    }
    return workers;
  }
  std::string Names() const { return InQuotes(Workers()); }

  const std::string subject_;
  const int64_t num_workers_;
  int64_t open_ = -1;
  int64_t generation_ = 0;
  bool closed_ = false;
  std::map<std::string, Member> members_;
  std::vector<std::string> newest_;  // Some of their names.
  Arrivals<Value> arrivals_;
  // The last round that ended, and its members.
  Known ended_;
  // The lead holds the turns that it gave. Another server holds the turns that
  // it was told last.
  Turns turns_;
  int64_t last_turn_ = 0;  // Grows in all rounds and generations.
  Processes processes_;
  Expected expected_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_OPEN_ROUND_H_
