// An event that happens once and that a thread waits for. Does not depend on
// TensorFlow, as absl's does.
#ifndef WRAPOPT_CC_ENGINE_NOTIFICATION_H_
#define WRAPOPT_CC_ENGINE_NOTIFICATION_H_

#include <pthread.h>

#include <mutex>  // NOLINT(build/c++11)

namespace wrapopt {

class Notification {
 public:
  Notification() = default;
  Notification(const Notification&) = delete;
  Notification& operator=(const Notification&) = delete;
  ~Notification() { pthread_cond_destroy(&happened_); }

  // The object may be destroyed as soon as Wait has returned.
  void Notify() {
    std::lock_guard<std::mutex> lock(mu_);
    has_happened_ = true;
    pthread_cond_signal(&happened_);
  }

  // Only one thread may wait.
  void Wait() {
    std::lock_guard<std::mutex> lock(mu_);
    while (!has_happened_) {
      pthread_cond_wait(&happened_, mu_.native_handle());
    }
  }

 private:
  std::mutex mu_;  // Guards has_happened_.
  bool has_happened_ = false;
  // Not std::condition_variable, which needs a glibc newer than 2.27.
  pthread_cond_t happened_ = PTHREAD_COND_INITIALIZER;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_NOTIFICATION_H_
