// The rounds of model averaging on a parameter server: the values that workers
// have pushed, and the waits of workers. Does not depend on TensorFlow.
//
// A wait is a callback in a list and holds no thread. Another call, its
// deadline, the end of its step or the end of the rounds removes it from the
// list and runs the callback. Callbacks run after the lock is released, because
// they may call the rounds again.
#ifndef WRAPOPT_CC_ENGINE_ROUNDS_H_
#define WRAPOPT_CC_ENGINE_ROUNDS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/arrivals.h"
#include "cc/engine/deadline_timer.h"

namespace wrapopt {

inline constexpr int64_t kLastRound = std::numeric_limits<int64_t>::max();

// Success, or an error with the code of the same name in TensorFlow.
struct RoundsStatus {
  enum class Code {
    kOk,
    kAborted,
    kCancelled,
    kDeadlineExceeded,
    kFailedPrecondition,
    kInvalidArgument,
  };

  static RoundsStatus Aborted(std::string message) {
    return {Code::kAborted, std::move(message)};
  }
  static RoundsStatus Cancelled(std::string message) {
    return {Code::kCancelled, std::move(message)};
  }
  static RoundsStatus DeadlineExceeded(std::string message) {
    return {Code::kDeadlineExceeded, std::move(message)};
  }
  static RoundsStatus FailedPrecondition(std::string message) {
    return {Code::kFailedPrecondition, std::move(message)};
  }
  static RoundsStatus InvalidArgument(std::string message) {
    return {Code::kInvalidArgument, std::move(message)};
  }

  bool ok() const { return code == Code::kOk; }

  Code code = Code::kOk;
  std::string message;
};

template <class... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// `Value` is a tensor, or another type in a test.
template <class Value>
class Rounds : public std::enable_shared_from_this<Rounds<Value>> {
 public:
  struct Answer {
    RoundsStatus status;
    int64_t open = 0;
    std::vector<std::string> workers = {};
    int64_t generation = 0;
    int64_t turn = -1;
    Turns turns = {};
  };

  // A wait for the end of a round, for its members, or for a turn to send
  // values to it.
  struct Wait {
    int64_t round;
    int64_t generation = 0;
    // 0: waits for the end of the round. Else: for the members of the round.
    int64_t min_workers = 0;
    // Whether it waits for a turn; then how many others and it may have one.
    bool turns = false;
    int64_t most_turns = 0;
    double turn_secs = 0;  // How long the turn lives.
    double timeout_secs;
    // How long a gather waits for more workers after min_workers have come.
    double grace_secs = std::numeric_limits<double>::infinity();
    std::string worker;  // The name of a worker that is alive, or "".
    // Registers a function to call if the step of the wait ends; returns false
    // if the step has ended. `unwatch` unregisters it. Both are empty if the
    // step cannot end.
    std::function<bool(std::function<void()>)> watch;
    std::function<void()> unwatch;
    std::function<void(const Answer&)> done;

    bool is_watched = false;
    std::optional<Timer::Id> timer = std::nullopt;
    std::optional<Timer::Id> grace = std::nullopt;

    Place place() const { return {round, generation}; }
  };

  // The timer must outlive the rounds. `warn` writes a sentence to the log.
  Rounds(const std::string& name, int64_t num_workers, Timer* timer,
         std::function<void(const std::string&)> warn)
      : subject_("averaging rounds '" + name + "'"),
        num_workers_(num_workers),
        timer_(timer),
        warn_(std::move(warn)) {}
  virtual ~Rounds() = default;

  const std::string& subject() const { return subject_; }
  int64_t num_workers() const { return num_workers_; }

  RoundsStatus Push(const std::string& worker, int64_t round,
                    std::vector<Value> values, bool* accepted) {
    Deferred after(timer_);
    std::lock_guard<std::mutex> lock(mu_);
    *accepted = round > open_ || (round == open_ && !closed_);
    if (*accepted) {
      if (round > open_) Open(round, &after);
      const RoundsStatus room = CheckRoom(worker);
      if (!room.ok()) return room;
      values_[worker].values.swap(values);
      after.dropped.push_back(std::move(values));
    }
    if (expected_) expected_->insert(worker);
    AnswerReadyWaits(&after);
    return RoundsStatus();
  }

  // Starts a wait, whose callback may run before this returns.
  void Start(Wait wait) {
    Deferred after(timer_);
    std::lock_guard<std::mutex> lock(mu_);
    const bool gathers = wait.min_workers > 0;
    if (gone_) return after.Add(std::move(wait), {Gone()});
    if (gathers && wait.round != open_ && !is_served()) {
      const RoundsStatus status = NotOpen("a gather", wait.round);
      return after.Add(std::move(wait), {status});
    }
    if (expected_ && !wait.worker.empty()) expected_->insert(wait.worker);
    const uint64_t id = next_wait_++;
    waits_.emplace(id, std::move(wait));
    AnswerReadyWaits(&after);
    const auto found = waits_.find(id);
    if (found == waits_.end()) return;

    Wait& waiting = found->second;
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

  // Returns value number `value` of each worker.
  RoundsStatus Values(int64_t round, const std::vector<std::string>& workers,
                      size_t value, std::vector<Value>* values) {
    std::lock_guard<std::mutex> lock(mu_);
    if (round != open_) return NotOpen("a mean", round);
    for (const std::string& worker : workers) {
      const auto found = values_.find(worker);
      if (found == values_.end()) {
        return RoundsStatus::FailedPrecondition(Text(
            subject_, " must have values of worker '", worker, "' in round ",
            open_, ", got values of ", Names(),
            ": the worker must push before the mean is taken"));
      }
      if (value >= found->second.values.size()) {
        return RoundsStatus::InvalidArgument(Text(
            "value must be less than ", found->second.values.size(),
            ", the number of values that worker '", worker, "' pushed to ",
            subject_, ", got ", value));
      }
      values->push_back(found->second.values[value]);
    }
    return RoundsStatus();
  }

  RoundsStatus Next(int64_t round, bool reset, int64_t* open) {
    Deferred after(timer_);
    std::lock_guard<std::mutex> lock(mu_);
    if (reset) {
      round = open_;
    } else if (round < open_) {
      return NotOpen("the end of a round", round);
    }
    if (round == kLastRound) {
      return RoundsStatus::FailedPrecondition(Text(
          subject_, " cannot continue after round ", kLastRound,
          ", the last: use another shared_name"));
    }
    if (reset) expected_.reset();
    Open(round + 1, &after);
    AnswerReadyWaits(&after);
    *open = open_;
    return RoundsStatus();
  }

  // Answers all waits. No op can find these rounds any more.
  void End() {
    Deferred after(timer_);
    std::lock_guard<std::mutex> lock(mu_);
    gone_ = true;
    for (auto& [id, wait] : waits_) after.Add(std::move(wait), {Gone()});
    waits_.clear();
  }

 protected:
  // Below, functions that take a Deferred, and const ones, need mu_.

  // A worker whose values are part of the open round.
  struct Member {
    double weight = 1;
    std::vector<Value> values;
  };
  using Members = std::map<std::string, Member>;
  using Waits = std::map<uint64_t, Wait>;

  // Work for after the lock is released. Declare it before the lock.
  struct Deferred {
    explicit Deferred(Timer* timer) : timer(timer) {}
    ~Deferred() {
      for (auto& [wait, answer] : answers) {
        if (wait.timer) timer->Cancel(*wait.timer);
        if (wait.grace) timer->Cancel(*wait.grace);
        // The step lives until `done`.
        if (wait.is_watched) wait.unwatch();
        wait.done(answer);
      }
    }

    void Add(Wait wait, Answer answer) {
      answers.emplace_back(std::move(wait), std::move(answer));
    }

    Timer* const timer;
    std::vector<std::pair<Wait, Answer>> answers;
    // Freed after the lock is released, since freeing gigabytes takes time.
    std::vector<std::vector<Value>> dropped;
    Members all_dropped;
  };

  // See ServedRounds.
  virtual bool is_served() const { return false; }
  // The members of a round that is over; none if the rounds do not know them.
  virtual std::vector<std::string> MembersOf(const Place& ended) const {
    return {};
  }
  // Answers a wait for a turn, if it is over.
  virtual bool GiveTurn(const Wait& wait, Answer* answer) { return false; }

  virtual void Open(int64_t round, Deferred* after) {
    open_ = round;
    closed_ = false;
    after->all_dropped.swap(values_);
  }

  RoundsStatus CheckRoom(const std::string& worker) const {
    if (static_cast<int64_t>(values_.size()) < num_workers_ ||
        values_.count(worker) > 0) {
      return RoundsStatus();
    }
    return RoundsStatus::InvalidArgument(Text(
        subject_, " have num_workers = ", num_workers_, ", but '", worker,
        "' came to round ", open_, " after ", Names(),
        ": give each worker a unique name that does not change, ",
        "or correct num_workers"));
  }

  // Calls `ring` after some seconds.
  template <class Ring>
  std::optional<Timer::Id> After(double seconds, Ring ring) {
    // No timer for longer waits: steady_clock overflows after 292 years.
    constexpr double kForever = 1e9;
    if (!(seconds < kForever)) return std::nullopt;
    // The rounds may be deleted before.
    const std::weak_ptr<Rounds> weak = this->weak_from_this();
    return timer_->Set(seconds, [weak, ring = std::move(ring)] {
      if (const auto self = weak.lock()) ring(self.get());
    });
  }

  bool IsQuorum(int64_t min_workers) const {
    const int64_t came = values_.size();
    if (came == num_workers_) return true;
    return expected_ && came >= min_workers &&
           std::all_of(expected_->begin(), expected_->end(),
                       [this](const std::string& worker) {
                         return values_.count(worker) > 0;
                       });
  }

  void Close() {
    closed_ = true;
    if (static_cast<int64_t>(values_.size()) == num_workers_) {
      expected_.reset();
      return;
    }
    warn_(Text("Round ", open_, " of ", subject_, " is made of ",
               values_.size(), " of ", num_workers_, " workers: ", Names(),
               "."));
  }

  // Closes the round if its values suffice for a gather, and answers all waits
  // that are over.
  void AnswerReadyWaits(Deferred* after) {
    for (auto& [id, wait] : waits_) {
      if (closed_ || wait.min_workers == 0 || wait.place() != place()) continue;
      if (IsQuorum(wait.min_workers)) {
        Close();
      } else if (!wait.grace &&
                 static_cast<int64_t>(values_.size()) >= wait.min_workers) {
        wait.grace = After(wait.grace_secs,
                           [id = id](Rounds* self) { self->TimeOut(id); });
      }
    }
    for (auto i = waits_.begin(); i != waits_.end();) {
      const auto here = i++;
      Wait& wait = here->second;
      Answer answer;
      answer.open = open_;
      if (wait.turns) {
        if (!GiveTurn(wait, &answer)) continue;
      } else if (wait.min_workers == 0) {
        if (wait.place() == place()) continue;
      } else if (wait.place() != place() && is_served()) {
        answer.workers = MembersOf(wait.place());
      } else if (wait.round != open_) {
        answer.status = RoundsStatus::FailedPrecondition(Text(
            "round ", wait.round, " of ", subject_, " ended during its ",
            "gather, round ", open_, " is open: there is a second chief, or ",
            "this one was restarted; only one may run"));
      } else if (closed_) {
        answer.workers = Workers();
      } else {
        continue;
      }
      after->Add(std::move(wait), std::move(answer));
      waits_.erase(here);
    }
  }

  // Called by `watch`'s registration, which `unwatch` then must not remove.
  void Cancel(uint64_t id) {
    Deferred after(timer_);
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = waits_.find(id);
    if (found != waits_.end()) Cancel(found, &after);
  }

  void Cancel(typename Waits::iterator found, Deferred* after) {
    Wait& wait = found->second;
    wait.is_watched = false;
    const RoundsStatus status = RoundsStatus::Cancelled(
        Text("the wait for round ", wait.round, " of ", subject_,
                     " was cancelled: its step or session has ended"));
    after->Add(std::move(wait), {status});
    waits_.erase(found);
  }

  void TimeOut(uint64_t id) {
    Deferred after(timer_);
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = waits_.find(id);
    if (found == waits_.end()) return;
    const Wait& wait = found->second;
    const int64_t came = values_.size();
    if (wait.min_workers > 0 && came >= wait.min_workers) {
      // A missing worker is not expected again until it pushes or waits.
      expected_.emplace();
      for (const auto& [worker, values] : values_) expected_->insert(worker);
      Close();
      return AnswerReadyWaits(&after);
    }
    const RoundsStatus status = RoundsStatus::DeadlineExceeded(Missed(wait));
    after.Add(std::move(found->second), {status});
    waits_.erase(found);
  }

  std::string Missed(const Wait& wait) const {
    const std::string limit = Text(wait.timeout_secs, " seconds");
    if (wait.min_workers > 0) {
      return Text(
          "round ", open_, " of ", subject_, " got values of ", values_.size(),
          " workers within ", limit, " (", Names(), "), but needs ",
          wait.min_workers, " of ", num_workers_, ": restart the others, ",
          "wait longer, or reduce min_workers");
    }
    if (wait.turns) {
      return Text("round ", open_, " of ", subject_, " gave no turn within ",
                  limit, ": other workers send their values too slowly");
    }
    if (wait.round < 0) {
      return Text("no chief has opened ", subject_, " within ", limit,
                  ": start the chief with its hook, or run its get_init_op()");
    }
    return Text("the chief did not end round ", wait.round, " of ", subject_,
                " within ", limit, ": restart the chief if it is dead");
  }

  RoundsStatus NotOpen(const char* what, int64_t round) const {
    return RoundsStatus::FailedPrecondition(Text(
        what, " must be of the open round, got round ", round, " of ",
        subject_, ", which ", round < open_ ? "is over" : "is not yet open",
        ", round ", open_, " is open: run get_init_op() or the hook first"));
  }

  RoundsStatus Gone() const {
    return RoundsStatus::Aborted(Text(subject_, " were deleted"));
  }

  Place place() const { return {open_, generation_}; }

  std::vector<std::string> Workers() const {
    std::vector<std::string> names;
    for (const auto& [worker, member] : values_) names.push_back(worker);
    return names;
  }

  std::string Names() const {
    if (values_.empty()) return "none";
    std::string names;
    for (const auto& [worker, values] : values_) {
      names += (names.empty() ? "'" : ", '") + worker + "'";
    }
    return names;
  }

  const std::string subject_;
  const int64_t num_workers_;
  Timer* const timer_;
  const std::function<void(const std::string&)> warn_;

  std::mutex mu_;  // Guards all below.
  bool gone_ = false;
  int64_t open_ = -1;
  int64_t generation_ = 0;
  bool closed_ = false;
  Members values_;  // Of the open round.
  // The workers that a gather expects; nullopt: all.
  std::optional<std::set<std::string>> expected_;
  Waits waits_;
  uint64_t next_wait_ = 0;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_ROUNDS_H_
