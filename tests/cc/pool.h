// A pool of threads for tests.
#ifndef WRAPOPT_TESTS_CC_POOL_H_
#define WRAPOPT_TESTS_CC_POOL_H_

#include <condition_variable>  // NOLINT(build/c++11)
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>   // NOLINT(build/c++11)
#include <thread>  // NOLINT(build/c++11)
#include <utility>
#include <vector>

#include "cc/engine/threads.h"

namespace wrapopt {

class Pool final : public Threads {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this] { Run(); });
    }
  }
  // Ends once all tasks have run.
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mu_);
      ends_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t count() const override { return threads_.size(); }
  void Schedule(std::function<void()> task) const override {
    {
      const std::lock_guard<std::mutex> lock(mu_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mu_);
    for (;;) {
      if (!tasks_.empty()) {
        const std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        lock.lock();
      } else if (ends_) {
        return;
      } else {
        changed_.wait(lock);
      }
    }
  }

  mutable std::mutex mu_;
  mutable std::condition_variable changed_;
  mutable std::deque<std::function<void()>> tasks_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

// Runs `work(t)` in threads that begin at about the same time.
template <class Work>
void InThreads(int count, const Work& work) {
  std::mutex mu;
  std::condition_variable go;
  int waiting = count;
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      std::unique_lock<std::mutex> lock(mu);
      if (--waiting == 0) go.notify_all();
      go.wait(lock, [&] { return waiting == 0; });
      lock.unlock();
      work(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace wrapopt

#endif  // WRAPOPT_TESTS_CC_POOL_H_
