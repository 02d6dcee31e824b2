// Wrapopt>AveragingRounds, Push, Gather, Mean, Next and Wait: what a parameter
// server keeps of model averaging, and how workers wait for one another there.
//
// An op that waits holds no thread: it leaves its done callback behind. What
// may answer it is another op, its deadline, the end of its own step, or the end
// of the rounds, whichever takes it out of the list first. Callbacks run when
// the lock is released, for they may come back here.
#include <algorithm>
#include <chrono>  // NOLINT(build/c++11)
#include <cmath>
#include <condition_variable>  // NOLINT(build/c++11)
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <optional>
#include <set>
#include <string>
#include <thread>  // NOLINT(build/c++11)
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/kernels/parallel.h"
#include "cc/kernels/variables.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/mutex.h"

namespace wrapopt {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::DataTypeString;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

constexpr int64_t kLastRound = std::numeric_limits<int64_t>::max();

// Calls functions when their time has come, from one thread for all of them.
// There is one for the process, and it is never destroyed: at the end of the
// process that thread may still be asleep in it.
class Alarm {
 public:
  using Clock = std::chrono::steady_clock;
  using Id = std::pair<Clock::time_point, uint64_t>;

  static Alarm& Get() {
    static Alarm* const alarm = new Alarm;
    return *alarm;
  }

  Id Set(Clock::time_point time, std::function<void()> ring) {
    std::lock_guard<std::mutex> lock(mu_);
    const Id id(time, next_++);
    set_.emplace(id, std::move(ring));
    if (!running_) {
      running_ = true;
      std::thread([this] { Run(); }).detach();
    } else if (set_.begin()->first == id) {
      earlier_.notify_one();
    }
    return id;
  }

  // Of one that has rung already, or is about to, too.
  void Cancel(const Id& id) {
    std::lock_guard<std::mutex> lock(mu_);
    set_.erase(id);
  }

 private:
  [[noreturn]] void Run() {
    std::unique_lock<std::mutex> lock(mu_);
    for (;;) {
      if (set_.empty()) {
        // `wait` without a time would tie the wheel to GLIBCXX_3.4.30.
        earlier_.wait_for(lock, std::chrono::hours(1));
        continue;
      }
      const Clock::time_point first = set_.begin()->first.first;
      if (Clock::now() < first) {
        earlier_.wait_until(lock, first);
        continue;
      }
      const std::function<void()> ring =
          std::move(set_.extract(set_.begin()).mapped());
      lock.unlock();
      ring();
      lock.lock();
    }
  }

  std::mutex mu_;
  std::condition_variable earlier_;
  std::map<Id, std::function<void()>> set_;
  uint64_t next_ = 0;
  bool running_ = false;
};

std::string Seconds(double seconds) { return absl::StrCat(seconds, " seconds"); }

template <class Names>
std::string Quoted(const Names& names) {
  return absl::StrJoin(names, ", ", [](std::string* out, const auto& name) {
    absl::StrAppend(out, "'", name, "'");
  });
}

class Rounds : public std::enable_shared_from_this<Rounds> {
 public:
  struct Answer {
    absl::Status status;
    int64_t open = 0;
    std::vector<std::string> workers;
  };

  // What AveragingGather and AveragingWait leave behind.
  struct Wait {
    int64_t round;
    // 0: for the end of the round. Else: for those who make it up.
    int64_t min_workers = 0;
    double timeout_secs;
    std::string worker;  // Who is alive, or "".
    CancellationManager* cancellation;  // May be nullptr.
    std::function<void(const Answer&)> done;

    tensorflow::CancellationToken token = CancellationManager::kInvalidToken;
    std::optional<Alarm::Id> alarm = std::nullopt;
  };

  Rounds(const std::string& name, int64_t num_workers)
      : subject_(absl::StrCat("averaging rounds '", name, "'")),
        num_workers_(num_workers) {}

  const std::string& subject() const { return subject_; }
  int64_t num_workers() const { return num_workers_; }

  absl::Status Push(const std::string& worker, int64_t round,
                    std::vector<Tensor> values, bool* accepted) {
    Aftermath after;
    tensorflow::mutex_lock lock(mu_);
    *accepted = round > open_ || (round == open_ && !closed_);
    if (*accepted) {
      if (round > open_) Open(round, &after);
      if (static_cast<int64_t>(values_.size()) == num_workers_ &&
          values_.count(worker) == 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            subject_, " have num_workers = ", num_workers_,
            ", but '", worker, "' came to round ", open_, " after ",
            Names(), ": give each worker a name of its own that it keeps, or ",
            "say how many there are"));
      }
      values_[worker].swap(values);
      after.dropped.push_back(std::move(values));
    }
    if (expected_) expected_->insert(worker);
    Settle(&after);
    return absl::OkStatus();
  }

  // Answers now or later.
  void Start(Wait wait) {
    Aftermath after;
    tensorflow::mutex_lock lock(mu_);
    const bool gathers = wait.min_workers > 0;
    if (gone_) return after.Add(std::move(wait), {Gone()});
    if (gathers && wait.round != open_) {
      const absl::Status status = NotOpen("a gather", wait.round);
      return after.Add(std::move(wait), {status});
    }
    if (expected_ && !wait.worker.empty()) expected_->insert(wait.worker);
    const uint64_t id = next_wait_++;
    waits_.emplace(id, std::move(wait));
    Settle(&after);
    const auto found = waits_.find(id);
    if (found == waits_.end()) return;

    Wait& waiting = found->second;
    // The rounds may be gone when one of these is called.
    const std::weak_ptr<Rounds> weak = weak_from_this();
    if (waiting.cancellation != nullptr) {
      waiting.token = waiting.cancellation->get_cancellation_token();
      const bool registered = waiting.cancellation->RegisterCallback(
          waiting.token, [weak, id] {
            if (const auto self = weak.lock()) self->Cancel(id);
          });
      if (!registered) return Cancel(found, &after);
    }
    // Longer than any process: steady_clock counts to 292 years.
    constexpr double kForever = 1e9;
    if (waiting.timeout_secs < kForever) {
      waiting.alarm = Alarm::Get().Set(
          Alarm::Clock::now() +
              std::chrono::duration_cast<Alarm::Clock::duration>(
                  std::chrono::duration<double>(waiting.timeout_secs)),
          [weak, id] {
            if (const auto self = weak.lock()) self->TimeOut(id);
          });
    }
  }

  // One tensor of each of the workers.
  absl::Status Values(int64_t round, const std::vector<std::string>& workers,
                      size_t value, std::vector<Tensor>* values) {
    tensorflow::mutex_lock lock(mu_);
    if (round != open_) return NotOpen("a mean", round);
    for (const std::string& worker : workers) {
      const auto found = values_.find(worker);
      if (found == values_.end()) {
        return absl::FailedPreconditionError(absl::StrCat(
            subject_, " have no values of worker '", worker, "' in round ",
            open_, ", they have those of ", Names(),
            ": it must push there before the mean is taken"));
      }
      if (value >= found->second.size()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "value must be less than ", found->second.size(),
            ", the number of values that worker '", worker, "' pushed to ",
            subject_, ", got ", value));
      }
      values->push_back(found->second[value]);
    }
    return absl::OkStatus();
  }

  absl::Status Next(int64_t round, bool reset, int64_t* open) {
    Aftermath after;
    tensorflow::mutex_lock lock(mu_);
    if (reset) {
      round = open_;
    } else if (round < open_) {
      return NotOpen("the end of a round", round);
    }
    if (round == kLastRound) {
      return absl::FailedPreconditionError(absl::StrCat(
          subject_, " cannot go on after round ", kLastRound,
          ", the last: use another shared_name"));
    }
    if (reset) expected_.reset();
    Open(round + 1, &after);
    Settle(&after);
    *open = open_;
    return absl::OkStatus();
  }

  // Answers all that wait. No op finds these rounds any more.
  void End() {
    Aftermath after;
    tensorflow::mutex_lock lock(mu_);
    gone_ = true;
    for (auto& [id, wait] : waits_) after.Add(std::move(wait), {Gone()});
    waits_.clear();
  }

 private:
  using Pushed = std::map<std::string, std::vector<Tensor>>;
  using Waits = std::map<uint64_t, Wait>;

  // What is to be done once the lock is released: declared before it is taken.
  struct Aftermath {
    ~Aftermath() {
      for (auto& [wait, answer] : answers) {
        if (wait.alarm) Alarm::Get().Cancel(*wait.alarm);
        // The step, and so its manager, lives until it has its answer.
        if (wait.token != CancellationManager::kInvalidToken) {
          wait.cancellation->DeregisterCallback(wait.token);
        }
        wait.done(answer);
      }
    }

    void Add(Wait wait, Answer answer) {
      answers.emplace_back(std::move(wait), std::move(answer));
    }

    std::vector<std::pair<Wait, Answer>> answers;
    // To return gigabytes to the system takes a while.
    std::vector<std::vector<Tensor>> dropped;
    Pushed all_dropped;
  };

  void Open(int64_t round, Aftermath* after)
      TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    open_ = round;
    closed_ = false;
    after->all_dropped.swap(values_);
  }

  bool IsQuorum(int64_t min_workers) const TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const int64_t came = values_.size();
    if (came == num_workers_) return true;
    return expected_ && came >= min_workers &&
           std::all_of(expected_->begin(), expected_->end(),
                       [this](const std::string& worker) {
                         return values_.count(worker) > 0;
                       });
  }

  void Close() TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    closed_ = true;
    if (static_cast<int64_t>(values_.size()) == num_workers_) {
      expected_.reset();
      return;
    }
    LOG(WARNING) << "Round " << open_ << " of " << subject_ << " is made of "
                 << values_.size() << " of " << num_workers_
                 << " workers: " << Names() << ".";
  }

  // Closes the round if somebody waits for what is there, and answers all who
  // can be answered.
  void Settle(Aftermath* after) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (const auto& [id, wait] : waits_) {
      if (!closed_ && wait.min_workers > 0 && wait.round == open_ &&
          IsQuorum(wait.min_workers)) {
        Close();
      }
    }
    for (auto i = waits_.begin(); i != waits_.end();) {
      const auto here = i++;
      Wait& wait = here->second;
      Answer answer;
      if (wait.min_workers == 0) {
        if (wait.round == open_) continue;
        answer.open = open_;
      } else if (wait.round != open_) {
        answer.status = absl::FailedPreconditionError(absl::StrCat(
            "round ", wait.round, " of ", subject_, " ended while it was ",
            "gathered, round ", open_, " is open: another chief has taken ",
            "over, or this one has been restarted; only one may run"));
      } else if (closed_) {
        for (const auto& [worker, values] : values_) {
          answer.workers.push_back(worker);
        }
      } else {
        continue;
      }
      after->Add(std::move(wait), std::move(answer));
      waits_.erase(here);
    }
  }

  // Inside the callback of the cancellation manager, which cannot be taken out
  // of it then.
  void Cancel(uint64_t id) {
    Aftermath after;
    tensorflow::mutex_lock lock(mu_);
    const auto found = waits_.find(id);
    if (found != waits_.end()) Cancel(found, &after);
  }

  void Cancel(Waits::iterator found, Aftermath* after)
      TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Wait& wait = found->second;
    wait.token = CancellationManager::kInvalidToken;
    const absl::Status status = absl::CancelledError(
        absl::StrCat("the wait for round ", wait.round, " of ", subject_,
                     " was cancelled: its step or session has ended"));
    after->Add(std::move(wait), {status});
    waits_.erase(found);
  }

  void TimeOut(uint64_t id) {
    Aftermath after;
    tensorflow::mutex_lock lock(mu_);
    const auto found = waits_.find(id);
    if (found == waits_.end()) return;
    Wait& wait = found->second;
    const int64_t came = values_.size();
    if (wait.min_workers > 0 && came >= wait.min_workers) {
      // Who did not come is not waited for again before it is heard of.
      expected_.emplace();
      for (const auto& [worker, values] : values_) expected_->insert(worker);
      Close();
      return Settle(&after);
    }
    const absl::Status status = absl::DeadlineExceededError(Missed(wait));
    after.Add(std::move(wait), {status});
    waits_.erase(found);
  }

  std::string Missed(const Wait& wait) const TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const std::string limit = Seconds(wait.timeout_secs);
    if (wait.min_workers > 0) {
      return absl::StrCat(
          "round ", open_, " of ", subject_, " got values of ", values_.size(),
          " workers within ", limit, " (", Names(), "), but ",
          wait.min_workers, " of ", num_workers_, " are needed: are the ",
          "others alive? Start them again, wait longer, or need fewer");
    }
    if (wait.round < 0) {
      return absl::StrCat("no chief has opened ", subject_, " within ", limit,
                          ": does the chief run, and its hook or get_init_op()?");
    }
    return absl::StrCat("the chief did not end round ", wait.round, " of ",
                        subject_, " within ", limit, ": is it alive?");
  }

  absl::Status NotOpen(const char* what, int64_t round) const
      TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, " must be of the round that is open, got round ", round, " of ",
        subject_, ", which ", round < open_ ? "is over" : "is yet to come",
        ", round ", open_, " is open: run get_init_op() or the hook first"));
  }

  absl::Status Gone() const {
    return absl::AbortedError(absl::StrCat(subject_, " were deleted"));
  }

  std::string Names() const TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (values_.empty()) return "none";
    std::vector<std::string> names;
    for (const auto& [worker, values] : values_) names.push_back(worker);
    return Quoted(names);
  }

  const std::string subject_;
  const int64_t num_workers_;

  tensorflow::mutex mu_;
  bool gone_ TF_GUARDED_BY(mu_) = false;
  int64_t open_ TF_GUARDED_BY(mu_) = -1;
  bool closed_ TF_GUARDED_BY(mu_) = false;
  // Of the open round. Once it is closed, its members.
  Pushed values_ TF_GUARDED_BY(mu_);
  // Who is known to be alive; none: all are taken for it.
  std::optional<std::set<std::string>> expected_ TF_GUARDED_BY(mu_);
  Waits waits_ TF_GUARDED_BY(mu_);
  uint64_t next_wait_ TF_GUARDED_BY(mu_) = 0;
};

// A wait must not keep the rounds alive: when they are deleted it is answered.
class RoundsResource : public tensorflow::ResourceBase {
 public:
  RoundsResource(const std::string& name, int64_t num_workers)
      : rounds_(std::make_shared<Rounds>(name, num_workers)) {}
  ~RoundsResource() override { rounds_->End(); }

  std::string DebugString() const override { return rounds_->subject(); }

  const std::shared_ptr<Rounds>& rounds() const { return rounds_; }

 private:
  const std::shared_ptr<Rounds> rounds_;
};

absl::Status Misshapen(const std::string& subject, const Tensor& tensor,
                       const std::string& expected) {
  return absl::InvalidArgumentError(
      absl::StrCat(subject, " misshapen: got ", tensor.shape().DebugString(),
                   " but expected ", expected));
}

template <class Value>
absl::Status ReadScalar(OpKernelContext* ctx, const char* name, Value* value) {
  const Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->input(name, &tensor));
  if (tensor->dims() != 0) return Misshapen(name, *tensor, "[] (a scalar)");
  *value = tensor->scalar<Value>()();
  return absl::OkStatus();
}

absl::Status ReadRound(OpKernelContext* ctx, int64_t* round) {
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "round", round));
  // There must be one after it.
  if (*round < kLastRound) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("round must be less than 2^63 - 1, got ", *round));
}

absl::Status ReadTimeout(OpKernelContext* ctx, double* timeout_secs) {
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "timeout_secs", timeout_secs));
  if (*timeout_secs > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "timeout_secs must be greater than 0, infinity for no deadline, got ",
      *timeout_secs));
}

absl::Status FindRounds(OpKernelContext* ctx, std::shared_ptr<Rounds>* rounds) {
  const Tensor* handle;
  TF_RETURN_IF_ERROR(ctx->input("rounds", &handle));
  if (handle->dims() != 0) return Misshapen("rounds", *handle, "[] (a scalar)");
  tensorflow::core::RefCountPtr<RoundsResource> resource;
  const absl::Status found = LookupResource(
      ctx, handle->scalar<tensorflow::ResourceHandle>()(), &resource);
  if (!found.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rounds must be those of Wrapopt>AveragingRounds on this "
                     "device: ", found.message()));
  }
  *rounds = resource->rounds();
  return absl::OkStatus();
}

class AveragingRoundsOp
    : public tensorflow::ResourceOpKernel<RoundsResource> {
 public:
  explicit AveragingRoundsOp(OpKernelConstruction* ctx)
      : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_workers", &num_workers_));
  }

 private:
  absl::Status CreateResource(RoundsResource** resource) override
      TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    *resource = new RoundsResource(cinfo_.name(), num_workers_);
    return absl::OkStatus();
  }

  absl::Status VerifyResource(RoundsResource* resource) override {
    const Rounds& rounds = *resource->rounds();
    if (rounds.num_workers() == num_workers_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        rounds.subject(), " have num_workers = ", rounds.num_workers(),
        ", got num_workers = ", num_workers_,
        ": all who share them must say the same, or use another shared_name"));
  }

  int64_t num_workers_;
};

class AveragingPushOp : public OpKernel {
 public:
  explicit AveragingPushOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<Rounds> rounds;
    OP_REQUIRES_OK(ctx, FindRounds(ctx, &rounds));
    tstring worker;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, "worker", &worker));
    int64_t round;
    OP_REQUIRES_OK(ctx, ReadRound(ctx, &round));
    tensorflow::OpInputList list;
    OP_REQUIRES_OK(ctx, ctx->input_list("values", &list));
    std::vector<Tensor> values;
    for (const Tensor& value : list) {
      // Nobody can write to a buffer that has no other owner.
      if (value.RefCountIsOne()) {
        values.push_back(value);
        continue;
      }
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(value.dtype(), value.shape(),
                                             &values.emplace_back()));
      if (value.TotalBytes() > 0) {
        std::memcpy(values.back().data(), value.data(), value.TotalBytes());
      }
    }
    Tensor* accepted;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("accepted", {}, &accepted));
    OP_REQUIRES_OK(ctx, rounds->Push(worker, round, std::move(values),
                                     &accepted->scalar<bool>()()));
  }
};

class AveragingGatherOp : public AsyncOpKernel {
 public:
  explicit AveragingGatherOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {}

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<Rounds> rounds;
    Rounds::Wait wait;
    OP_REQUIRES_OK_ASYNC(ctx, FindRounds(ctx, &rounds), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadRound(ctx, &wait.round), done);
    OP_REQUIRES_OK_ASYNC(
        ctx, ReadScalar(ctx, "min_workers", &wait.min_workers), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadTimeout(ctx, &wait.timeout_secs), done);
    OP_REQUIRES_ASYNC(
        ctx,
        wait.min_workers >= 1 && wait.min_workers <= rounds->num_workers(),
        absl::InvalidArgumentError(absl::StrCat(
            "min_workers must be in [1, ", rounds->num_workers(),
            "], the num_workers of ", rounds->subject(), ", got ",
            wait.min_workers)),
        done);
    wait.cancellation = ctx->cancellation_manager();
    wait.done = [ctx, done = std::move(done)](const Rounds::Answer& answer) {
      OP_REQUIRES_OK_ASYNC(ctx, answer.status, done);
      Tensor* workers;
      const int64_t m = answer.workers.size();
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output("workers", {m}, &workers),
                           done);
      std::copy(answer.workers.begin(), answer.workers.end(),
                workers->flat<tstring>().data());
      done();
    };
    rounds->Start(std::move(wait));
  }
};

class AveragingWaitOp : public AsyncOpKernel {
 public:
  explicit AveragingWaitOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("worker", &worker_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<Rounds> rounds;
    Rounds::Wait wait;
    OP_REQUIRES_OK_ASYNC(ctx, FindRounds(ctx, &rounds), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadRound(ctx, &wait.round), done);
    OP_REQUIRES_OK_ASYNC(ctx, ReadTimeout(ctx, &wait.timeout_secs), done);
    wait.worker = worker_;
    wait.cancellation = ctx->cancellation_manager();
    wait.done = [ctx, done = std::move(done)](const Rounds::Answer& answer) {
      OP_REQUIRES_OK_ASYNC(ctx, answer.status, done);
      Tensor* open;
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output("open", {}, &open), done);
      open->scalar<int64_t>()() = answer.open;
      done();
    };
    rounds->Start(std::move(wait));
  }

 private:
  std::string worker_;
};

class AveragingNextOp : public OpKernel {
 public:
  explicit AveragingNextOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("reset", &reset_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<Rounds> rounds;
    OP_REQUIRES_OK(ctx, FindRounds(ctx, &rounds));
    int64_t round;
    OP_REQUIRES_OK(ctx, ReadRound(ctx, &round));
    Tensor* open;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("open", {}, &open));
    OP_REQUIRES_OK(ctx, rounds->Next(round, reset_, &open->scalar<int64_t>()()));
  }

 private:
  bool reset_;
};

// Serves resource and ref variables: `Variables` knows the difference.
class AveragingMeanOp : public OpKernel {
 public:
  explicit AveragingMeanOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string error;
    OP_REQUIRES(ctx, ChosenIsa(&isa_, &error),
                absl::InvalidArgumentError(error));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("value", &value_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<Rounds> rounds;
    OP_REQUIRES_OK(ctx, FindRounds(ctx, &rounds));
    int64_t round;
    OP_REQUIRES_OK(ctx, ReadRound(ctx, &round));
    std::vector<std::string> workers;
    OP_REQUIRES_OK(ctx, ReadWorkers(ctx, &workers));
    // Holds them while they are read: others may drop them meanwhile.
    std::vector<Tensor> values;
    OP_REQUIRES_OK(ctx, rounds->Values(round, workers, value_, &values));

    Variables variables(ctx, &memory_);
    int centers;
    OP_REQUIRES_OK(
        ctx, variables.Find("centers", Variables::Access::kWrite, &centers));
    OP_REQUIRES_OK(ctx, variables.Lock());
    int64_t elements = 0;
    for (int i = 0; i < n_; ++i) {
      OP_REQUIRES_OK(ctx, variables.CheckDtype(centers + i, dtype_));
      elements += variables.size(centers + i);
    }
    for (size_t w = 0; w < values.size(); ++w) {
      OP_REQUIRES_OK(ctx, CheckValue(workers[w], values[w], elements));
    }
    OP_REQUIRES_OK(ctx, variables.PrepareToWrite());

    // The mean of the first k values in the scratch array, k = 1, 2, ...: of
    // values that are all the same it is exactly that. Then the assignment.
    const Number center = NumberOf(dtype_);
    const Number mean =
        center == Number::kDouble ? Number::kDouble : Number::kFloat;
    Pass pass(mean);
    std::vector<double> rates;
    for (size_t w = 0; w < values.size(); ++w) rates.push_back(1.0 / (w + 1));
    const double assign = 1;
    for (const double& rate : rates) {
      pass.AddStage({FindStep(RuleId::kEma, mean, center, isa_), &rate, 2,
                     SizeOf(center), /*new_inputs=*/true, /*scratch=*/0});
    }
    pass.AddStage({FindStep(RuleId::kEma, center, mean, isa_), &assign, 2,
                   2 * SizeOf(center), /*new_inputs=*/false, /*scratch=*/1});
    size_t offset = 0;  // Bytes in each value.
    std::vector<void*> operands;
    for (int i = 0; i < n_; ++i) {
      operands.clear();
      for (const Tensor& value : values) {
        operands.push_back(nullptr);
        operands.push_back(static_cast<char*>(value.data()) + offset);
      }
      operands.push_back(variables.data(centers + i));
      operands.push_back(nullptr);
      pass.AddVariable(variables.size(centers + i), operands);
      offset += variables.size(centers + i) * SizeOf(center);
    }
    OP_REQUIRES_OK(ctx, RunPass(ctx, pass));
  }

 private:
  static absl::Status ReadWorkers(OpKernelContext* ctx,
                                  std::vector<std::string>* workers) {
    const Tensor* tensor;
    TF_RETURN_IF_ERROR(ctx->input("workers", &tensor));
    if (tensor->dims() != 1) {
      return Misshapen("workers", *tensor, "[M] (names of workers)");
    }
    const auto names = tensor->vec<tstring>();
    if (names.size() == 0) {
      return absl::InvalidArgumentError(
          "workers must name at least one worker to take the mean of, got none");
    }
    std::set<std::string> seen;
    for (int64_t w = 0; w < names.size(); ++w) {
      workers->push_back(names(w));
      if (!seen.insert(workers->back()).second) {
        return absl::InvalidArgumentError(absl::StrCat(
            "workers must name each worker once, got '", workers->back(),
            "' twice"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckValue(const std::string& worker, const Tensor& value,
                          int64_t elements) const {
    const std::string subject =
        absl::StrCat("value ", value_, " of worker '", worker, "'");
    if (value.dtype() != dtype_) {
      return absl::InvalidArgumentError(absl::StrCat(
          subject, " must be of dtype ", DataTypeString(dtype_),
          ", the centers', got ", DataTypeString(value.dtype())));
    }
    if (value.dims() == 1 && value.NumElements() == elements) {
      return absl::OkStatus();
    }
    return Misshapen(subject, value,
                     absl::StrCat("[", elements, "] (the elements of the ", n_,
                                  " centers one after another)"));
  }

  Variables::Memory memory_;
  Isa isa_;
  tensorflow::DataType dtype_;
  int n_;
  int64_t value_;
};

#define WRAPOPT_REGISTER(op, Kernel)                                          \
  REGISTER_KERNEL_BUILDER(Name("Wrapopt>" op).Device(tensorflow::DEVICE_CPU), \
                          Kernel)

WRAPOPT_REGISTER("AveragingRounds", AveragingRoundsOp);
WRAPOPT_REGISTER("AveragingPush", AveragingPushOp);
WRAPOPT_REGISTER("AveragingGather", AveragingGatherOp);
WRAPOPT_REGISTER("AveragingMean", AveragingMeanOp);
WRAPOPT_REGISTER("AveragingMeanRef", AveragingMeanOp);
WRAPOPT_REGISTER("AveragingNext", AveragingNextOp);
WRAPOPT_REGISTER("AveragingWait", AveragingWaitOp);

#undef WRAPOPT_REGISTER

}  // namespace
}  // namespace wrapopt
