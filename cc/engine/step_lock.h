// A lock that calls those who wait for it, in the order in which they came.
// Does not depend on TensorFlow.
//
// TensorFlow's own, the resource Mutex of its op MutexLock, becomes free if one
// who waits for it gives up, though another one holds it.
#ifndef WRAPOPT_CC_ENGINE_STEP_LOCK_H_
#define WRAPOPT_CC_ENGINE_STEP_LOCK_H_

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

  // Gets the lock for `who`, and calls `granted`: now, or in the Release() of
  // another one. Calls `watch` if it has to wait: whether it may.
  //
  // Returns false if it may not. Then `granted` is not called.
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

  // Returns whether `who` waits. Then it will not get the lock.
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

#endif  // WRAPOPT_CC_ENGINE_STEP_LOCK_H_
