// The rounds in which workers average their values on servers, without a chief.
// Does not depend on TensorFlow.
//
// Each of several servers has a part of the values. One of them leads: it gives
// turns, and it decides who is a member of a round. A worker
//
//   1. enters, at the lead, and gets a turn;
//   2. sends its values in parts to all servers, and tells the others what the
//      lead knows: who is a member, and which turns are alive;
//   3. arrives, at the lead, which makes it a member;
//   4. may tell the others that, which then use its values and free them;
//   5. waits, at the lead, until the round is closed;
//   6. ends the round on each server, the lead last.
//
// Each call but those of step 2 may be repeated, by any worker. So a worker may
// stop anywhere: others finish the round.
//
// A worker that then reads the center from a server does so in parts, too, and
// says when it has them all: the replies to a few workers are in memory at a
// time.
//
// A worker that is done leaves, at the lead. Rounds then count it as come.
//
// A wait is a callback in a list and holds no thread. Another call, its
// deadline, the end of its step or the end of the rounds removes it from the
// list and runs the callback. Callbacks run after the lock is released, because
// they may call the rounds again.
#ifndef WRAPOPT_CC_PROTOCOLS_ROUNDS_H_
#define WRAPOPT_CC_PROTOCOLS_ROUNDS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/protocols/arrivals.h"
#include "cc/protocols/deadline_timer.h"
#include "cc/protocols/round_waits.h"
#include "cc/protocols/rounds_status.h"
#include "cc/protocols/workers.h"

namespace wrapopt {

inline constexpr int64_t kLastRound = std::numeric_limits<int64_t>::max();

// How many workers read from a server at a time, and after how many seconds
// without a call one of them has stopped.
inline constexpr size_t kMostReaders = 4;
inline constexpr double kReaderSecs = 10;

// `Value` is a tensor, or another type in a test.
template <class Value>
class Rounds : public std::enable_shared_from_this<Rounds<Value>> {
 public:
  // A worker whose values are part of the open round. One of weight 0 has none:
  // the round does not wait for it, and its mean is that of the others.
  struct Member {
    double weight = 1;
    std::vector<Value> values;
  };

  // Work for after locks are released: those of the rounds, and of the caller,
  // if it makes this. Declare it before the locks.
  struct Deferred {
    explicit Deferred(Rounds* rounds) : timer(rounds->timer_) {}
    Deferred(const Deferred&) = delete;
    ~Deferred() {
      for (auto& [wait, answer] : answers) {
        if (wait.timer) timer->Cancel(*wait.timer);
        if (wait.grace) timer->Cancel(*wait.grace);
        // The step lives until `done`.
        if (wait.is_watched) wait.unwatch();
        wait.done(answer);
      }
    }

    void Add(RoundWait wait, RoundAnswer answer) {
      answers.emplace_back(std::move(wait), std::move(answer));
    }

    Timer* const timer;
    std::vector<std::pair<RoundWait, RoundAnswer>> answers;
    // Freed after the lock is released, since freeing gigabytes takes time.
    std::vector<std::vector<Value>> dropped;
    std::map<std::string, Member> all_dropped;
  };

  // The timer must outlive the rounds. `warn` writes a sentence to the log.
  Rounds(const std::string& name, int64_t num_workers, Timer* timer,
         std::function<void(const std::string&)> warn)
      : subject_("averaging rounds '" + name + "'"),
        num_workers_(num_workers),
        timer_(timer),
        warn_(std::move(warn)) {}

  const std::string& subject() const { return subject_; }
  int64_t num_workers() const { return num_workers_; }

  Known known() {
    std::lock_guard<std::mutex> lock(mu_);
    return KnownNow();
  }

  // Rounds wait for this worker from now on.
  void Expect(const std::string& worker) {
    std::lock_guard<std::mutex> lock(mu_);
    expected_.Add(worker);
  }

  // Whether no generation has begun, and no worker waits for one.
  bool is_unused() {
    std::lock_guard<std::mutex> lock(mu_);
    return generation_ == 0 && waits_.empty() && arrivals_.size() == 0;
  }

  // Makes a worker known by its name. Only if it resumes, it takes the name
  // from another process, or the place of a worker that has left.
  RoundsStatus Join(const std::string& worker, int64_t process, bool resumes,
                    int64_t* workers) {
    std::lock_guard<std::mutex> lock(mu_);
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

  // Rounds do not wait for a worker from now on, until another process of it
  // comes. False if another process has its name; the process of a worker that
  // others tell of is 0.
  bool Leave(const std::string& worker, int64_t process) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    if (!processes_.Leave(worker, process)) return false;
    ForgetTurns(worker, &after);
    AnswerReadyWaits(&after);
    return true;
  }

  // The workers that have left.
  std::set<std::string> left() {
    std::lock_guard<std::mutex> lock(mu_);
    return processes_.left();
  }

  // The number of workers whose values are no members'.
  int64_t staged() {
    std::lock_guard<std::mutex> lock(mu_);
    return arrivals_.size();
  }

  // Starts a wait, whose callback may run before this returns. A turn has the
  // number -1 if values are not wanted: if another place is open, the round is
  // closed, the worker is a member, or it has entered again.
  void Start(RoundWait wait) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    RoundsStatus status;
    if (gone_) status = Gone();
    if (status.ok() && wait.what != For::kClose) status = Meet(wait, &after);
    if (!status.ok()) return after.Add(std::move(wait), {status});
    const uint64_t id = next_wait_++;
    waits_.emplace(id, std::move(wait));
    AnswerReadyWaits(&after);
    const auto found = waits_.find(id);
    if (found == waits_.end()) return;

    RoundWait& waiting = found->second;
    if (waiting.watch) {
      // The rounds may be deleted before it is called.
      const std::weak_ptr<Rounds> weak = this->weak_from_this();
      waiting.is_watched = waiting.watch([weak, id] {
        if (const auto self = weak.lock()) self->Cancel(id);
      });
      if (!waiting.is_watched) return Cancel(found, &after);
    }
    waiting.timer = After(waiting.timeout_secs,
                          [id](Rounds* self) { self->TimeOut(id); });
  }

  // Follows what the lead knows, and adds values [first, first + values.size())
  // of the `count` values of a worker that has a turn. Values of a later
  // generation wait for a Restore.
  bool Stage(const std::string& worker, const Known& known, double weight,
             int64_t count, int64_t first, std::vector<Value> values) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    Follow(known, &after);
    if (known.place.generation <= generation_ &&
        (known.place != place() || closed_ || turns_.is_over(known.turn) ||
         members_.count(worker) > 0)) {
      return false;
    }
    arrivals_.Add(worker, known.place, known.turn, weight, count, first,
                  std::move(values), &after.dropped);
    return true;
  }

  // Makes a worker that has a turn a member, and ends its turn.
  bool Arrive(const std::string& worker, const Known& told, Known* known) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    const bool accepted = told.place == place() && !closed_ &&
                          turns_.alive.count(told.turn) > 0 &&
                          HasStaged(worker, told.place) &&
                          arrivals_.Find(worker)->turn == told.turn;
    if (accepted) {
      Admit(worker);
      EndTurn(told.turn, &after);
    }
    *known = KnownOfNewest();
    return accepted;
  }

  // Ends a worker's reading, and a turn. False if the turn was over.
  bool Release(const std::string& worker, int64_t turn) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    const auto reader = readers_.find(worker);
    if (reader != readers_.end()) {
      CancelTimer(reader->second);
      readers_.erase(reader);
      AnswerReadyWaits(&after);
    }
    const bool was_alive = turns_.alive.count(turn) > 0;
    if (was_alive) EndTurn(turn, &after);
    return was_alive;
  }

  // Tells a server that does not lead what the lead knows. False if another
  // place is open.
  bool Follow(const Known& known) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    return Follow(known, &after);
  }

  // The values that members have brought since the last call. The rounds no
  // longer hold them.
  std::vector<Member> TakeValues() {
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<Member> taken;
    for (auto& [worker, member] : members_) {
      if (member.values.empty()) continue;
      taken.push_back({member.weight, std::move(member.values)});
      member.values.clear();
    }
    return taken;
  }

  // Whether the round that the lead has closed is open here. Then its members
  // must have brought their values.
  RoundsStatus CheckClosed(const Known& known, bool* is_open) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    *is_open = known.place == place();
    if (!*is_open) return RoundsStatus();
    Follow(known, &after);
    if (known.closed && known.workers == Workers()) return RoundsStatus();
    return RoundsStatus::FailedPrecondition(Text(
        "round ", open_, " of ", subject_, " must ",
        known.closed ? Text("have the values of ", known.workers.size(),
                            " workers")
                     : "be closed",
        " before it ends, got values of ", Names()));
  }

  // Ends the open round and opens the next one.
  RoundsStatus Next(Deferred* after) {
    std::lock_guard<std::mutex> lock(mu_);
    if (open_ == kLastRound) {
      return RoundsStatus::FailedPrecondition(Text(
          subject_, " cannot continue after round ", kLastRound,
          ", the last: use another shared_name"));
    }
    Open(open_ + 1, after);
    return RoundsStatus();
  }

  // Begins a generation at `place`, with the values that the worker has staged
  // for it. Without any, `needs_values` must be false or the open round begins
  // again. No effect unless the server's generation is `from`.
  RoundsStatus Restore(const std::string& worker, int64_t from,
                       const Place& place, bool needs_values,
                       std::vector<Value>* values, bool* restored,
                       Deferred* after) {
    std::lock_guard<std::mutex> lock(mu_);
    *restored = from == generation_ && place.generation > from;
    if (!*restored) return RoundsStatus();
    if (HasStaged(worker, place)) {
      *values = arrivals_.Take(worker).values;
    } else if (needs_values && place.round != open_) {
      return RoundsStatus::FailedPrecondition(Text(
          "worker ", InQuotes(worker), " must send a center before round ",
          place.round, " of ", subject_, " begins, got none; round ", open_,
          " is open"));
    }
    generation_ = place.generation;
    turns_.newest = last_turn_;  // The lead may have been restarted.
    expected_.All();
    Open(place.round, after);
    return RoundsStatus();
  }

  // Answers all waits. No op can find these rounds any more.
  void End() {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    gone_ = true;
    for (auto& [id, wait] : waits_) after.Add(std::move(wait), {Gone()});
    waits_.clear();
  }

 private:
  // The ends of errors about names: they say what to do.
  static constexpr char kUniqueName[] =
      ": give each worker a unique name that does not change, or correct "
      "num_workers";
  static constexpr char kNewJob[] =
      ": a restarted worker passes resume=True; a new job has another name, or "
      "begins after the old one is dropped";

  using For = RoundWait::For;
  using Waits = std::map<uint64_t, RoundWait>;

  // The worker that has a turn, and the timer that ends the turn.
  struct TurnEnd {
    std::string worker;
    std::optional<Timer::Id> timer;
  };

  // Below, functions need mu_.

  Place place() const { return {open_, generation_}; }

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

  // The members of a round that is closed.
  Known KnownAtEnd(const Place& place) const {
    Known known{place, true};
    known.workers = Workers();
    known.without_values = WithoutValues();
    return known;
  }

  bool HasStaged(const std::string& worker, const Place& place) const {
    const auto* const staged = arrivals_.Find(worker);
    return staged != nullptr && staged->place == place &&
           staged->is_complete();
  }

  bool Follow(const Known& known, Deferred* after) {
    if (known.place != place()) return false;
    for (const std::string& worker : known.workers) {
      if (HasStaged(worker, known.place) && members_.count(worker) == 0) {
        Admit(worker);
      }
    }
    if (known.turns.newest > turns_.newest) {
      turns_ = known.turns;
      arrivals_.DropOver(turns_, generation_, &after->dropped);
    }
    return true;
  }

  void Admit(const std::string& worker) {
    auto staged = arrivals_.Take(worker);
    members_[worker] = {staged.weight, std::move(staged.values)};
    constexpr size_t kMostTold = 16;
    if (newest_.size() == kMostTold) newest_.erase(newest_.begin());
    newest_.push_back(worker);
  }

  void Open(int64_t round, Deferred* after) {
    ended_ = KnownAtEnd({round - 1, generation_});
    open_ = round;
    closed_ = false;
    after->all_dropped.swap(members_);
    newest_.clear();
    arrivals_.DropAll(&after->dropped);
    for (const auto& [turn, end] : ends_) CancelTimer(end.timer);
    ends_.clear();
    turns_.alive.clear();
    AnswerReadyWaits(after);
  }

  // Notes a worker that wants a turn, or reads the center: it will come to the
  // open round, however long it takes to train.
  RoundsStatus Meet(const RoundWait& wait, Deferred* after) {
    if (wait.what == For::kRead) {
      if (!wait.worker.empty()) expected_.Add(wait.worker);
      return RoundsStatus();
    }
    const RoundsStatus status = NoteProcess(wait.worker, wait.process);
    if (!status.ok()) return status;
    expected_.Add(wait.worker);
    ForgetTurns(wait.worker, after);
    return status;
  }

  // Ends the turn of a worker that enters again, and its wait for one. A worker
  // enters again if the answer was lost.
  void ForgetTurns(const std::string& worker, Deferred* after) {
    for (auto i = waits_.begin(); i != waits_.end();) {
      const auto here = i++;
      RoundWait& wait = here->second;
      if (!wait.is_for_turn() || wait.worker != worker) continue;
      // It waits for a turn of the open round.
      after->Add(std::move(wait), {RoundsStatus(), KnownOfNewest()});
      waits_.erase(here);
    }
    for (auto i = ends_.begin(); i != ends_.end();) {
      const auto here = i++;
      if (here->second.worker == worker) EndTurn(here->first, after);
    }
  }

  // Answers a wait for a turn, if it is over.
  bool GiveTurn(const RoundWait& wait, Known* known) {
    const bool restores = wait.what == For::kRestore;
    const bool wanted =
        wait.place == place() &&
        (restores || (!closed_ && members_.count(wait.worker) == 0));
    if (wanted && !restores && is_stopped()) return false;
    if (wanted) {
      const size_t most = restores ? 1 : wait.most_turns;
      if (turns_.alive.size() >= most) return false;
      const int64_t turn = ++last_turn_;
      turns_.newest = turn;
      turns_.alive.insert(turn);
      ends_[turn] = {wait.worker, After(wait.turn_secs, [turn](Rounds* self) {
                       self->TimeOutTurn(turn);
                     })};
    }
    *known = KnownOfNewest();
    known->place = wait.place;
    if (wanted) known->turn = last_turn_;
    return true;
  }

  // Lets a worker read one more part. False if too many others read.
  bool LetRead(const std::string& worker) {
    if (readers_.count(worker) == 0 && readers_.size() >= kMostReaders) {
      return false;
    }
    std::optional<Timer::Id>& end = readers_[worker];
    CancelTimer(end);
    end = After(kReaderSecs,
                [worker](Rounds* self) { self->Release(worker, -1); });
    return true;
  }

  void EndTurn(int64_t turn, Deferred* after) {
    turns_.alive.erase(turn);
    const auto end = ends_.find(turn);
    if (end != ends_.end()) {
      CancelTimer(end->second.timer);
      ends_.erase(end);
    }
    arrivals_.DropOver(turns_, generation_, &after->dropped);
    AnswerReadyWaits(after);
  }

  void TimeOutTurn(int64_t turn) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    if (turns_.alive.count(turn) > 0) EndTurn(turn, &after);
  }

  void CancelTimer(const std::optional<Timer::Id>& timer) {
    if (timer) timer_->Cancel(*timer);
  }

  // Calls `ring` after some seconds.
  template <class Ring>
  std::optional<Timer::Id> After(double seconds, Ring ring) {
    // No timer for longer waits: steady_clock overflows after 292 years.
    constexpr double kLongest = 1e9;
    if (!(seconds < kLongest)) return std::nullopt;
    // The rounds may be deleted before.
    const std::weak_ptr<Rounds> weak = this->weak_from_this();
    return timer_->Set(seconds, [weak, ring = std::move(ring)] {
      if (const auto self = weak.lock()) ring(self.get());
    });
  }

  void Close() {
    closed_ = true;
    if (came() >= num_workers_) return expected_.All();
    warn_(Text("Round ", open_, " of ", subject_, " is made of ",
               members_.size(), " of ", num_workers_ - absent(), " workers: ",
               Names(), "."));
  }

  // The number of workers that have left and are no members.
  int64_t absent() const {
    const std::set<std::string>& left = processes_.left();
    return std::count_if(left.begin(), left.end(),
                         [this](const std::string& worker) {
                           return members_.count(worker) == 0;
                         });
  }
  // The number of workers that the round does not wait for.
  int64_t came() const { return members_.size() + absent(); }

  bool Suffice(int64_t came, int64_t min_workers) const {
    return !members_.empty() && came >= min_workers;
  }

  // Closes the round if its members suffice for a wait, and answers all waits
  // that are over.
  void AnswerReadyWaits(Deferred* after) {
    const int64_t all = came();  // Of all waits: many may have left.
    for (auto& [id, wait] : waits_) {
      if (closed_ || wait.what != For::kClose || wait.place != place()) {
        continue;
      }
      if (!Suffice(all, wait.min_workers)) continue;
      if (all >= num_workers_ ||
          expected_.HaveCome([this](const std::string& name) {
            return members_.count(name) > 0 ||
                   processes_.left().count(name) > 0;
          })) {
        Close();
      } else if (!wait.grace && WithoutValues().size() < members_.size()) {
        wait.grace = After(wait.grace_secs,
                           [id = id](Rounds* self) { self->TimeOut(id); });
      }
    }
    for (auto i = waits_.begin(); i != waits_.end();) {
      const auto here = i++;
      RoundWait& wait = here->second;
      RoundAnswer answer;
      if (wait.what == For::kRead) {
        if (!LetRead(wait.worker)) continue;
      } else if (wait.what != For::kClose) {
        if (!GiveTurn(wait, &answer.known)) continue;
      } else {
        answer.known.place = wait.place;
        if (is_stopped()) continue;
        if (wait.place != place()) {
          // Only of the last round that ended, the members are known.
          if (wait.place == ended_.place) answer.known = ended_;
        } else if (closed_) {
          answer.known = KnownAtEnd(wait.place);
        } else {
          continue;
        }
        answer.known.closed = true;
      }
      after->Add(std::move(wait), std::move(answer));
      waits_.erase(here);
    }
  }

  // Called by `watch`'s registration, which `unwatch` then must not remove.
  void Cancel(uint64_t id) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = waits_.find(id);
    if (found != waits_.end()) Cancel(found, &after);
  }

  void Cancel(typename Waits::iterator found, Deferred* after) {
    RoundWait& wait = found->second;
    wait.is_watched = false;
    const RoundsStatus status = RoundsStatus::Cancelled(
        Text("the wait for round ", wait.place.round, " of ", subject_,
             " was cancelled: its step or session has ended"));
    after->Add(std::move(wait), {status});
    waits_.erase(found);
  }

  void TimeOut(uint64_t id) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = waits_.find(id);
    if (found == waits_.end()) return;
    const RoundWait& wait = found->second;
    if (wait.what == For::kClose && Suffice(came(), wait.min_workers)) {
      // A missing worker is not expected again until it enters.
      expected_.Only(Workers());
      return AnswerReadyWaits(&after);
    }
    const double limit = wait.timeout_secs;
    const std::string within =
        Text(" within ", limit < 10 ? limit : std::round(limit), " seconds");
    const RoundsStatus status = RoundsStatus::DeadlineExceeded(
        Text("round ", open_, " of ", subject_,
             wait.what == For::kClose
                 ? Text(" got values of ", members_.size(), " workers",
                        within, " (", Names(), "), but needs ",
                        std::max<int64_t>(wait.min_workers - absent(), 1),
                        " of ", num_workers_ - absent())
                 : Text(" gave no turn",
                        wait.what == For::kRead ? " to read" : "", within),
             ": restart the others, wait longer, or reduce min_workers"));
    after.Add(std::move(found->second), {status});
    waits_.erase(found);
  }

  // Notes that a process uses a worker's name.
  RoundsStatus NoteProcess(const std::string& worker, int64_t process) {
    if (processes_.IsFull(worker, num_workers_)) {
      return TooMany(worker, kUniqueName);
    }
    return processes_.IsCurrent(worker, process) ? RoundsStatus()
                                                 : Replaced(worker);
  }

  RoundsStatus TooMany(const std::string& worker,
                       const std::string& what_to_do) const {
    return RoundsStatus::InvalidArgument(Text(
        subject_, " have num_workers = ", num_workers_, ", but ",
        InQuotes(worker), " came to round ", open_, " after ",
        InQuotes(processes_.Names()), what_to_do));
  }

  RoundsStatus Replaced(const std::string& worker) const {
    return RoundsStatus::InvalidArgument(Text(
        "worker ", InQuotes(worker), " of ", subject_, " is another ",
        "process now: give each worker a unique name"));
  }

  RoundsStatus Gone() const {
    return RoundsStatus::Aborted(Text(subject_, " were deleted"));
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
  Timer* const timer_;
  const std::function<void(const std::string&)> warn_;

  std::mutex mu_;  // Guards all below.
  bool gone_ = false;
  int64_t open_ = -1;
  int64_t generation_ = 0;
  bool closed_ = false;
  std::map<std::string, Member> members_;  // Of the open round.
  std::vector<std::string> newest_;        // Some of their names.
  Arrivals<Value> arrivals_;
  // The last round that ended, and its members.
  Known ended_;
  // The lead holds the turns that it gave. Another server holds the turns that
  // it was told last.
  Turns turns_;
  int64_t last_turn_ = 0;  // Grows in all rounds and generations.
  std::map<int64_t, TurnEnd> ends_;
  // The workers that read, and the timers that end their reading.
  std::map<std::string, std::optional<Timer::Id>> readers_;
  Processes processes_;
  Expected expected_;
  Waits waits_;
  uint64_t next_wait_ = 0;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_ROUNDS_H_
