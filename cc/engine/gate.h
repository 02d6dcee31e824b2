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
#ifndef WRAPOPT_CC_ENGINE_GATE_H_
#define WRAPOPT_CC_ENGINE_GATE_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <utility>

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
  // The record at the value `step` of the step variable. Aborted updates may
  // have changed weights, so they count.
  int64_t Record(int64_t step, int64_t* in_flight) {
    std::lock_guard<std::mutex> lock(mu_);
    *in_flight = in_flight_;
    return SaturatedSum(step, aborted_);
  }

  // Returns whether the update is admitted, and then in flight.
  bool Admit(int64_t step, int64_t recorded, int64_t limit,
             int64_t* staleness) {
    std::lock_guard<std::mutex> lock(mu_);
    // Some updates in flight may have incremented the step already, and other
    // ops may have set it to any number.
    const int64_t done = SaturatedSum(step, aborted_);
    admitted_ = std::clamp(admitted_, done, SaturatedSum(done, in_flight_));
    *staleness = SaturatedDifference(admitted_, recorded);
    if (limit < 0 || *staleness > limit) return false;
    admitted_ = SaturatedSum(admitted_, 1);
    ++in_flight_;
    return true;
  }

  void Complete() {
    std::lock_guard<std::mutex> lock(mu_);
    --in_flight_;
  }

  void Abort() {
    std::lock_guard<std::mutex> lock(mu_);
    --in_flight_;
    ++aborted_;
    // If it has incremented the step itself, it counts twice. If it has not,
    // the next Admit() takes this back.
    admitted_ = SaturatedSum(admitted_, 1);
  }

 private:
  std::mutex mu_;  // Guards all below.
  // The step, once all updates in flight are complete, plus aborted_.
  int64_t admitted_ = 0;
  int64_t in_flight_ = 0;
  int64_t aborted_ = 0;
};

// The right to one update, and whether it was granted.
class Ticket {
 public:
  Ticket() = default;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  ~Ticket() {
    if (state_ == State::kInFlight) gate_->Abort();
  }

  // The gate has admitted the update. Comes before all calls of others.
  void Admit(std::shared_ptr<Gate> gate) {
    gate_ = std::move(gate);
    state_ = State::kInFlight;
  }

  // Null if the update is not admitted.
  const Gate* gate() const { return gate_.get(); }

  // Returns whether this call completed the update; false if an earlier one
  // did.
  bool Complete() {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ != State::kInFlight) return false;
    state_ = State::kComplete;
    gate_->Complete();
    return true;
  }

 private:
  enum class State { kRefused, kInFlight, kComplete };

  std::mutex mu_;  // Guards state_ once others know the ticket.
  std::shared_ptr<Gate> gate_;
  State state_ = State::kRefused;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_GATE_H_
