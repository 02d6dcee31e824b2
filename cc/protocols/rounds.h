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

#include <cstdint>
#include <functional>
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
#include "cc/protocols/open_round.h"
#include "cc/protocols/round_waits.h"
#include "cc/protocols/rounds_status.h"

namespace wrapopt {

// How many workers read from a server at a time, and after how many seconds
// without a call one of them has stopped.
inline constexpr size_t kMostReaders = 4;
inline constexpr double kReaderSecs = 10;

// `Value` is a tensor, or another type in a test.
template <class Value>
class Rounds : public std::enable_shared_from_this<Rounds<Value>> {
 public:
  using Member = typename OpenRound<Value>::Member;

  // Work for after locks are released: those of the rounds, and of the caller,
  // if it makes this. Declare it before the locks.
  struct Deferred {
    explicit Deferred(Rounds* rounds) : timer(rounds->timer_) {}
    Deferred(const Deferred&) = delete;
    ~Deferred() {
      for (auto& [wait, answer] : answers) wait.End(timer, answer);
    }

    void Add(RoundWait wait, RoundAnswer answer) {
      answers.emplace_back(std::move(wait), std::move(answer));
    }

    Timer* const timer;
    std::vector<std::pair<RoundWait, RoundAnswer>> answers;
    typename OpenRound<Value>::Dropped dropped;
  };

  // The timer must outlive the rounds. `warn` writes a sentence to the log.
  Rounds(const std::string& name, int64_t num_workers, Timer* timer,
         std::function<void(const std::string&)> warn)
      : timer_(timer),
        warn_(std::move(warn)),
        round_("averaging rounds '" + name + "'", num_workers) {}

  const std::string& subject() const { return round_.subject(); }
  int64_t num_workers() const { return round_.num_workers(); }

  Known known() {
    std::lock_guard<std::mutex> lock(mu_);
    return round_.KnownNow();
  }

  // Rounds wait for this worker from now on.
  void Expect(const std::string& worker) {
    std::lock_guard<std::mutex> lock(mu_);
    round_.Expect(worker);
  }

  // Whether no generation has begun, and no worker waits for one.
  bool is_unused() {
    std::lock_guard<std::mutex> lock(mu_);
    return round_.place().generation == 0 && waits_.empty() && !round_.staged();
  }

  // Makes a worker known by its name. Only if it resumes, it takes the name
  // from another process, or the place of a worker that has left.
  RoundsStatus Join(const std::string& worker, int64_t process, bool resumes,
                    int64_t* workers) {
    std::lock_guard<std::mutex> lock(mu_);
    return round_.Join(worker, process, resumes, workers);
  }

  // Rounds do not wait for a worker from now on, until another process of it
  // comes. False if another process has its name; the process of a worker that
  // others tell of is 0.
  bool Leave(const std::string& worker, int64_t process) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    if (!round_.Leave(worker, process)) return false;
    ForgetTurns(worker, &after);
    AnswerReadyWaits(&after);
    return true;
  }

  // The workers that have left.
  std::set<std::string> left() {
    std::lock_guard<std::mutex> lock(mu_);
    return round_.left();
  }

  // The number of workers whose values are no members'.
  int64_t staged() {
    std::lock_guard<std::mutex> lock(mu_);
    return round_.staged();
  }

  // Starts a wait, whose callback may run before this returns. A turn has the
  // number -1 if values are not wanted: if another place is open, the round is
  // closed, the worker is a member, or it has entered again.
  void Start(RoundWait wait) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    const RoundsStatus status = gone_ ? round_.Gone() : Meet(wait, &after);
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
    return round_.Stage(worker, known, weight, count, first, std::move(values),
                        &after.dropped);
  }

  // Makes a worker that has a turn a member, and ends its turn.
  bool Arrive(const std::string& worker, const Known& told, Known* known) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    const bool accepted = round_.Accept(worker, told);
    if (accepted) EndTurn(told.turn, &after);
    *known = round_.KnownOfNewest();
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
    const bool was_alive = round_.IsAlive(turn);
    if (was_alive) EndTurn(turn, &after);
    return was_alive;
  }

  // Tells a server that does not lead what the lead knows. False if another
  // place is open.
  bool Follow(const Known& known) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    return round_.Follow(known, &after.dropped);
  }

  // The values that members have brought since the last call. The rounds no
  // longer hold them.
  std::vector<Member> TakeValues() {
    std::lock_guard<std::mutex> lock(mu_);
    return round_.TakeValues();
  }

  // Whether the round that the lead has closed is open here. Then its members
  // must have brought their values.
  RoundsStatus CheckClosed(const Known& known, bool* is_open) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    return round_.CheckClosed(known, is_open, &after.dropped);
  }

  // Ends the open round and opens the next one.
  RoundsStatus Next(Deferred* after) {
    std::lock_guard<std::mutex> lock(mu_);
    const RoundsStatus status = round_.Next(&after->dropped);
    if (status.ok()) BeginRound(after);
    return status;
  }

  // Begins a generation at `place`, with the values that the worker has staged
  // for it. Without any, `needs_values` must be false or the open round begins
  // again. No effect unless the server's generation is `from`.
  RoundsStatus Restore(const std::string& worker, int64_t from,
                       const Place& place, bool needs_values,
                       std::vector<Value>* values, bool* restored,
                       Deferred* after) {
    std::lock_guard<std::mutex> lock(mu_);
    const RoundsStatus status =
        round_.Restore(worker, from, place, needs_values, values, restored,
                       &after->dropped);
    if (status.ok() && *restored) BeginRound(after);
    return status;
  }

  // Answers all waits. No op can find these rounds any more.
  void End() {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    gone_ = true;
    for (auto& [id, wait] : waits_) after.Add(std::move(wait), {round_.Gone()});
    waits_.clear();
  }

 private:
  using For = RoundWait::For;
  using Waits = std::map<uint64_t, RoundWait>;

  // The worker that has a turn, and the timer that ends the turn.
  struct TurnEnd {
    std::string worker;
    std::optional<Timer::Id> timer;
  };

  // Below, functions need mu_.

  void BeginRound(Deferred* after) {
    for (const auto& [turn, end] : ends_) CancelTimer(end.timer);
    ends_.clear();
    AnswerReadyWaits(after);
  }

  // Notes a worker that wants a turn, or reads the center.
  RoundsStatus Meet(const RoundWait& wait, Deferred* after) {
    if (wait.what == For::kRead && !wait.worker.empty()) {
      round_.Expect(wait.worker);
    }
    if (!wait.is_for_turn()) return RoundsStatus();
    const RoundsStatus status = round_.Enter(wait.worker, wait.process);
    if (status.ok()) ForgetTurns(wait.worker, after);
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
      after->Add(std::move(wait), {RoundsStatus(), round_.KnownOfNewest()});
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
    const bool wanted = wait.place == round_.place() &&
                        (restores || round_.Wants(wait.worker));
    int64_t turn = -1;
    if (wanted) {
      const size_t most = restores ? 1 : wait.most_turns;
      if ((!restores && round_.is_stopped()) || round_.num_turns() >= most) {
        return false;
      }
      turn = round_.BeginTurn();
      ends_[turn] = {wait.worker, After(wait.turn_secs, [turn](Rounds* self) {
                       self->TimeOutTurn(turn);
                     })};
    }
    *known = round_.KnownOfNewest();
    known->place = wait.place;
    known->turn = turn;
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
    const auto end = ends_.find(turn);
    if (end != ends_.end()) {
      CancelTimer(end->second.timer);
      ends_.erase(end);
    }
    round_.EndTurn(turn, &after->dropped);
    AnswerReadyWaits(after);
  }

  void TimeOutTurn(int64_t turn) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    EndTurn(turn, &after);
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

  // Closes the round if its members suffice for a wait, and answers all waits
  // that are over.
  void AnswerReadyWaits(Deferred* after) {
    const int64_t came = round_.came();  // Of all waits: many may have left.
    for (auto& [id, wait] : waits_) {
      if (round_.closed() || wait.what != For::kClose ||
          wait.place != round_.place() ||
          !round_.Suffice(came, wait.min_workers)) {
        continue;
      }
      if (round_.HaveAllCome(came)) {
        const std::string warning = round_.Close();
        if (!warning.empty()) warn_(warning);
      } else if (!wait.grace && round_.HasValues()) {
        wait.grace = After(wait.grace_secs, [id = id](Rounds* self) {
          self->TimeOut(id, /*is_grace=*/true);
        });
      }
    }
    for (auto i = waits_.begin(); i != waits_.end();) {
      const auto here = i++;
      RoundWait& wait = here->second;
      RoundAnswer answer;
      Known* const known = &answer.known;
      if (wait.what == For::kRead    ? !LetRead(wait.worker)
          : wait.what == For::kClose ? !round_.IsClosed(wait.place, known)
                                     : !GiveTurn(wait, known)) {
        continue;
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
    const RoundsStatus status = round_.Cancelled(wait.place);
    after->Add(std::move(wait), {status});
    waits_.erase(found);
  }

  void TimeOut(uint64_t id, bool is_grace = false) {
    Deferred after(this);
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = waits_.find(id);
    if (found == waits_.end()) return;
    RoundWait& wait = found->second;
    if (round_.is_stopped() && is_grace) return;
    if (round_.is_stopped() && wait.stopped_secs > 0) {
      const double more = std::exchange(wait.stopped_secs, 0);
      wait.timeout_secs += more;
      wait.timer = After(more, [id](Rounds* self) { self->TimeOut(id); });
      return;
    }
    if (wait.what == For::kClose &&
        round_.Suffice(round_.came(), wait.min_workers)) {
      round_.ExpectMembers();
      return AnswerReadyWaits(&after);
    }
    const RoundsStatus status = round_.TimedOut(wait);
    after.Add(std::move(found->second), {status});
    waits_.erase(found);
  }

  Timer* const timer_;
  const std::function<void(const std::string&)> warn_;

  std::mutex mu_;  // Guards all below, but not what is constant in `round_`.
  OpenRound<Value> round_;
  bool gone_ = false;
  std::map<int64_t, TurnEnd> ends_;
  // The workers that read, and the timers that end their reading.
  std::map<std::string, std::optional<Timer::Id>> readers_;
  Waits waits_;
  uint64_t next_wait_ = 0;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_ROUNDS_H_
