// The waits of workers in averaging rounds, and their answers. Does not depend
// on TensorFlow.
#ifndef WRAPOPT_CC_PROTOCOLS_ROUND_WAITS_H_
#define WRAPOPT_CC_PROTOCOLS_ROUND_WAITS_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "cc/protocols/arrivals.h"
#include "cc/protocols/deadline_timer.h"
#include "cc/protocols/rounds_status.h"

namespace wrapopt {

inline constexpr double kForever = std::numeric_limits<double>::infinity();

struct RoundAnswer {
  RoundsStatus status;
  Known known = {};
};

struct RoundWait {
  // That a round is closed, a turn to send values to it, a turn to restore a
  // center, or that a worker may read.
  enum class For { kClose, kTurn, kRestore, kRead };

  bool is_for_turn() const {
    return what == For::kTurn || what == For::kRestore;
  }

  For what = For::kClose;
  Place place = {};  // Not in kRead.
  // Not in kClose.
  std::string worker = {};
  // In kTurn and kRestore.
  int64_t process = 0;     // Unlike that of any other process.
  int64_t most_turns = 1;  // How many workers may have a turn.
  double turn_secs = 0;    // How long the turn lives.
  // In kClose. A round waits for more workers after min_workers have come.
  int64_t min_workers = 1;
  double grace_secs = kForever;

  double timeout_secs = kForever;
  double stopped_secs = 0;  // Added once, if the rounds are stopped by then.
  // Registers a function to call if the step of the wait ends; returns false if
  // the step has ended. `unwatch` unregisters it. Both are empty if the step
  // cannot end.
  std::function<bool(std::function<void()>)> watch = {};
  std::function<void()> unwatch = {};
  std::function<void(const RoundAnswer&)> done = {};

  // Answers it, after what else could end it has ended.
  void End(Timer* clock, const RoundAnswer& answer) const {
    if (timer) clock->Cancel(*timer);
    if (grace) clock->Cancel(*grace);
    // The step lives until `done`.
    if (is_watched) unwatch();
    done(answer);
  }

  // Set by the rounds, and not by the caller.
  bool is_watched = false;
  std::optional<Timer::Id> timer = {};
  std::optional<Timer::Id> grace = {};
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_ROUND_WAITS_H_
