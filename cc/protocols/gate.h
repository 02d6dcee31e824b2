// The staleness gate: admits or drops the updates of asynchronous training.
// Does not depend on TensorFlow.
//
// `recorded` is the number of updates that had completed when the worker
// recorded the step. Its weights surely contain these. `admitted` is the number
// of completed updates once all updates in flight are complete. The difference
// is the staleness: the number of updates that the weights may miss.
//
// An update is in flight from its admission until its ticket is completed or
// destroyed.
//
// An admitted update gets the least number that no update in flight or
// completed has, counted from the step. So N completed updates have N different
// numbers, though some of their workers may have died in others.
//
// A worker may die when its update is complete, and before it can say so.
// Whoever then tries the update again passes the token of the first try, and
// learns that there is nothing left to do.
#ifndef WRAPOPT_CC_PROTOCOLS_GATE_H_
#define WRAPOPT_CC_PROTOCOLS_GATE_H_

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>  // NOLINT(build/c++11)
#include <cstdint>
#include <ctime>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace wrapopt {

// A sum or a difference that saturates at the ends of int64: a step and its
// record may be any number.
inline int64_t SaturatedSum(int64_t a, int64_t b) {
  int64_t sum;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return a < 0 ? std::numeric_limits<int64_t>::min()
               : std::numeric_limits<int64_t>::max();
}
inline int64_t SaturatedDifference(int64_t a, int64_t b) {
  int64_t difference;
  if (!__builtin_sub_overflow(a, b, &difference)) return difference;
  return a < 0 ? std::numeric_limits<int64_t>::min()
               : std::numeric_limits<int64_t>::max();
}

// The state of a step's updates that is not in the step variable. The caller
// locks that variable: shared where it passes its value, and exclusively where
// it completes an update and increments the step.
class Gate {
 public:
  static constexpr std::chrono::milliseconds kPatience{1000};

  Gate() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&ended_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { pthread_cond_destroy(&ended_); }

  // An update, in the words of the gate.
  struct Update {
    int64_t number = -1;
    // Of the gate, which begins anew when others set the step.
    int64_t era = -1;
    // What all tries of the update have in common, or -1.
    int64_t token = -1;
    int64_t try_number = 0;  // Which of them this is.
    // Where a histogram counts it as admitted, or -1.
    int64_t bucket = -1;
  };

  // Begins a try of an update, and returns true; false if one with its token is
  // over. Waits for one that has begun. If that takes longer than `patience`,
  // its worker is gone and it will not end: it counts no more. A try is
  // followed by Admit() or GiveUp().
  bool BeginTry(Update* update, std::chrono::milliseconds patience) {
    if (update->token < 0) return true;
    std::unique_lock<std::mutex> lock(mu_);
    const int64_t nanoseconds =
        std::chrono::nanoseconds(patience).count();
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += nanoseconds % kSecond;
    end.tv_sec += nanoseconds / kSecond + end.tv_nsec / kSecond;
    end.tv_nsec %= kSecond;
    while (tries_.count(update->token) > 0 &&
           pthread_cond_timedwait(&ended_, mu_.native_handle(), &end) !=
               ETIMEDOUT) {
    }
    if (over_.count(update->token) > 0) return false;
    tries_[update->token] = update->try_number = ++last_try_;
    return true;
  }

  void GiveUp(const Update& update) {
    std::lock_guard<std::mutex> lock(mu_);
    EndTry(update);
  }

  // The record at the value `step` of the step variable. Aborted updates may
  // have changed weights, so they count.
  int64_t Record(int64_t step, int64_t* in_flight) {
    std::lock_guard<std::mutex> lock(mu_);
    *in_flight = in_flight_;
    return SaturatedSum(step, aborted_);
  }

  // Returns whether the update is admitted, and then in flight with a number.
  // The update is that of BeginTry().
  // The numbers need an update to increment the step when it completes. If
  // something else increments it before, a number may be given twice.
  bool Admit(int64_t step, int64_t recorded, int64_t limit,
             int64_t* staleness, Update* update) {
    std::lock_guard<std::mutex> lock(mu_);
    NoteStep(step);
    // Some updates in flight may have incremented the step already, and other
    // ops may have set it to any number.
    const int64_t done = SaturatedSum(step, aborted_);
    admitted_ = std::clamp(admitted_, done, SaturatedSum(done, in_flight_));
    *staleness = SaturatedDifference(admitted_, recorded);
    if (limit < 0 || *staleness > limit) {
      End(*update);
      return false;
    }
    admitted_ = SaturatedSum(admitted_, 1);
    TakeNumber(update);
    ++in_flight_;
    return true;
  }

  // The buckets of updates that were aborted since the last call. A histogram
  // counts them too much.
  std::vector<int64_t> TakeAbortedBuckets() {
    std::lock_guard<std::mutex> lock(mu_);
    return std::exchange(aborted_buckets_, {});
  }

  // Returns whether the update counts: false if another try has taken its
  // place.
  bool Complete(const Update& update) {
    std::lock_guard<std::mutex> lock(mu_);
    if (update.token >= 0 && !IsTheTry(update)) {
      TakeBack(update);
      return false;
    }
    --in_flight_;
    End(update);
    return true;
  }

  void Abort(const Update& update) {
    std::lock_guard<std::mutex> lock(mu_);
    EndTry(update);
    TakeBack(update);
  }

 private:
  // The tokens that are kept. A retry comes long before so many other updates.
  static constexpr size_t kTokens = 1 << 16;
  static constexpr int64_t kSecond = 1000000000;  // In nanoseconds.

  bool IsTheTry(const Update& update) const {
    const auto found = tries_.find(update.token);
    return found != tries_.end() && found->second == update.try_number;
  }

  // Others may try the update.
  void EndTry(const Update& update) {
    if (update.token < 0 || !IsTheTry(update)) return;
    tries_.erase(update.token);
    pthread_cond_broadcast(&ended_);
  }

  // No more tries of the update.
  void End(const Update& update) {
    if (update.token < 0) return;
    tries_.erase(update.token);
    if (over_.insert(update.token).second) order_.push_back(update.token);
    if (order_.size() > kTokens) {
      over_.erase(order_.front());
      order_.pop_front();
    }
    pthread_cond_broadcast(&ended_);
  }

  // Takes back the number of an update, which may have changed weights.
  void TakeBack(const Update& update) {
    if (update.era == era_) {
      free_.insert(update.number);
      if (update.bucket >= 0) aborted_buckets_.push_back(update.bucket);
    }
    --in_flight_;
    ++aborted_;
    // If it has incremented the step itself, it counts twice. If it has not,
    // the next Admit() takes this back.
    admitted_ = SaturatedSum(admitted_, 1);
  }

  // Begins a new era if others have set the step, and maybe the histogram.
  void NoteStep(int64_t step) {
    const int64_t completed = SaturatedDifference(
        next_, in_flight_ + static_cast<int64_t>(free_.size()));
    if (completed == step) return;
    ++era_;
    free_.clear();
    aborted_buckets_.clear();
    next_ = SaturatedSum(step, in_flight_);
  }

  void TakeNumber(Update* update) {
    update->era = era_;
    if (!free_.empty()) {
      update->number = free_.extract(free_.begin()).value();
      return;
    }
    update->number = next_;
    next_ = SaturatedSum(next_, 1);
  }

  std::mutex mu_;  // Guards all below.
  // The step, once all updates in flight are complete, plus aborted_.
  int64_t admitted_ = 0;
  int64_t in_flight_ = 0;
  int64_t aborted_ = 0;
  int64_t next_ = 0;  // The least number that was never given.
  std::set<int64_t> free_;  // Smaller ones, of aborted updates.
  int64_t era_ = 0;
  // A try. Not std::condition_variable, which needs a glibc newer than 2.27.
  pthread_cond_t ended_;
  std::unordered_map<int64_t, int64_t> tries_;  // {token: its try} begun.
  int64_t last_try_ = 0;
  std::vector<int64_t> aborted_buckets_;
  std::unordered_set<int64_t> over_;  // Tokens of updates that have ended.
  std::deque<int64_t> order_;  // The same, the oldest first.
};

// The right to one update. First it is a try, until the gate admits or refuses
// it. Others know it when it is admitted.
class Ticket {
 public:
  Ticket() = default;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  ~Ticket() {
    if (state_ == State::kBegun) gate_->GiveUp(update_);
    if (state_ == State::kInFlight) gate_->Abort(update_);
  }

  // As Gate::BeginTry().
  bool Begin(std::shared_ptr<Gate> gate, int64_t token,
             std::chrono::milliseconds patience = Gate::kPatience) {
    update_.token = token;
    if (!gate->BeginTry(&update_, patience)) return false;
    gate_ = std::move(gate);
    state_ = State::kBegun;
    return true;
  }

  // As Gate::Admit(), after Begin().
  bool Admit(int64_t step, int64_t recorded, int64_t limit,
             int64_t* staleness) {
    state_ = State::kRefused;
    if (gate_->Admit(step, recorded, limit, staleness, &update_)) {
      state_ = State::kInFlight;
      return true;
    }
    gate_ = nullptr;
    return false;
  }

  // -1 if the update was not admitted.
  int64_t number() const { return update_.number; }
  void set_bucket(int64_t bucket) { update_.bucket = bucket; }

  // Null if the update was not admitted.
  const Gate* gate() const { return gate_.get(); }

  // Returns whether this call completed the update; false if an earlier one
  // did. `counts`: whether the step is to count it.
  bool Complete(bool* counts) {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ != State::kInFlight) return false;
    state_ = State::kComplete;
    *counts = gate_->Complete(update_);
    return true;
  }

 private:
  enum class State { kRefused, kBegun, kInFlight, kComplete };

  std::mutex mu_;  // Guards state_ once others know the ticket.
  std::shared_ptr<Gate> gate_;
  Gate::Update update_;
  State state_ = State::kRefused;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_GATE_H_
