// The waits of workers in averaging rounds, and their answers. Does not depend
// on TensorFlow.
#ifndef WRAPOPT_CC_ENGINE_ROUND_WAITS_H_
#define WRAPOPT_CC_ENGINE_ROUND_WAITS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cc/engine/arrivals.h"
#include "cc/engine/deadline_timer.h"
#include "cc/engine/rounds_status.h"

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
  // Registers a function to call if the step of the wait ends; returns false if
  // the step has ended. `unwatch` unregisters it. Both are empty if the step
  // cannot end.
  std::function<bool(std::function<void()>)> watch = {};
  std::function<void()> unwatch = {};
  std::function<void(const RoundAnswer&)> done = {};

  // Set by the rounds, and not by the caller.
  bool is_watched = false;
  std::optional<Timer::Id> timer = {};
  std::optional<Timer::Id> grace = {};
};

// The processes that use the names of workers.
class Processes {
 public:
  // False if another process has taken the name of `process`.
  bool IsCurrent(const std::string& worker, int64_t process) {
    Of& known = processes_[worker];
    if (known.current == process) return true;
    if (known.before.count(process) > 0) return false;
    known.before.insert(known.current);
    known.current = process;
    return true;
  }

  bool Has(const std::string& worker) const {
    return processes_.count(worker) > 0;
  }
  // Whether a process would take the name from another one.
  bool IsTaken(const std::string& worker, int64_t process) const {
    const auto found = processes_.find(worker);
    return found != processes_.end() && found->second.current != process &&
           found->second.before.count(process) == 0;
  }

  int64_t size() const { return processes_.size(); }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& [name, of] : processes_) names.push_back(name);
    return names;
  }

 private:
  struct Of {
    int64_t current = 0;
    std::set<int64_t> before;
  };
  std::map<std::string, Of> processes_;
};

// The workers that a round waits for: all at first.
class Expected {
 public:
  void All() { names_.reset(); }
  void Only(const std::vector<std::string>& names) {
    names_ = std::set<std::string>(names.begin(), names.end());
  }
  void Add(const std::string& name) {
    if (names_) names_->insert(name);
  }

  // Whether the members of a round are all of `num_workers`, or at least
  // min_workers and all that are expected.
  template <class Members>
  bool HaveCome(const Members& members, int64_t min_workers,
                int64_t num_workers) const {
    const int64_t came = members.size();
    if (came == num_workers) return true;
    return names_ && came >= min_workers &&
           std::all_of(names_->begin(), names_->end(),
                       [&members](const std::string& name) {
                         return members.count(name) > 0;
                       });
  }

 private:
  std::optional<std::set<std::string>> names_;  // nullopt: all.
};

template <class Value>
std::vector<std::string> Keys(const std::map<std::string, Value>& map) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : map) keys.push_back(key);
  return keys;
}

// A name in quotes. Any bytes may be in a name, but not in a log or an error.
inline std::string InQuotes(const std::string& name) {
  std::string quoted = "'";
  for (const unsigned char c : name) {
    if (c >= ' ' && c <= '~' && c != '\'' && c != '\\') {
      quoted += static_cast<char>(c);
    } else {
      constexpr char kDigits[] = "0123456789abcdef";
      quoted += {'\\', 'x', kDigits[c / 16], kDigits[c % 16]};
    }
  }
  return quoted + "'";
}

inline std::string InQuotes(const std::vector<std::string>& names) {
  std::string quoted;
  for (const std::string& name : names) {
    quoted += (quoted.empty() ? "" : ", ") + InQuotes(name);
  }
  return names.empty() ? "none" : quoted;
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_ROUND_WAITS_H_
