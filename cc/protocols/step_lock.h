// A lock for callers that must not block a thread: it calls them when they get
// it, in the order in which they came. Does not depend on TensorFlow.
//
// TensorFlow's own lock, the resource of its op MutexLock, would not do. When a
// caller that waits gives up, it becomes free, even if another caller holds it.
#ifndef WRAPOPT_CC_PROTOCOLS_STEP_LOCK_H_
#define WRAPOPT_CC_PROTOCOLS_STEP_LOCK_H_

#include <algorithm>
#include <deque>
#include <functional>
#include <mutex>  // NOLINT(build/c++11)
#include <utility>

namespace wrapopt {

class StepLock {
 public:
  StepLock() = default;
  StepLock(const StepLock&) = delete;
  StepLock& operator=(const StepLock&) = delete;

  // Gets the lock for the caller `who`, and then calls `granted`: now, or later
  // in the Release() of another caller.
  //
  // If the caller has to wait, `watch` is called first, and returns whether the
  // caller may wait. If not, Acquire() returns false, and `granted` is not
  // called.
  bool Acquire(const void* who, const std::function<bool()>& watch,
               std::function<void()> granted) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (is_held_) {
        if (!watch()) return false;
        waiting_.push_back({who, std::move(granted)});
        return true;
      }
      is_held_ = true;
    }
    granted();
    return true;
  }

  // Ends the wait of `who`, which does not get the lock then. Returns false if
  // `who` does not wait.
  bool GiveUp(const void* who) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found =
        std::find_if(waiting_.begin(), waiting_.end(),
                     [who](const Waiting& x) { return x.who == who; });
    if (found == waiting_.end()) return false;
    waiting_.erase(found);
    return true;
  }

  void Release() {
    std::function<void()> granted;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (waiting_.empty()) {
        is_held_ = false;
        return;
      }
      granted = std::move(waiting_.front().granted);
      waiting_.pop_front();
    }
    granted();
  }

 private:
  struct Waiting {
    const void* who;
    std::function<void()> granted;
  };

  std::mutex mu_;  // Guards all below.
  bool is_held_ = false;
  std::deque<Waiting> waiting_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_STEP_LOCK_H_
