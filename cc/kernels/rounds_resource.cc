#include "cc/kernels/rounds_resource.h"

#include <algorithm>
#include <chrono>  // NOLINT(build/c++11)
#include <cstdint>
#include <map>
#include <mutex>  // NOLINT(build/c++11)
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "cc/kernels/codes.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/threads.h"
#include "cc/ops/averaging_rounds.h"
#include "cc/rules/rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/random.h"
#include "tensorflow/core/platform/tstring.h"

namespace wrapopt {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

std::pair<std::string, std::string> RoundsOptions::Compare(
    const RoundsOptions& other) const {
  const std::vector<std::string> lines = absl::StrSplit(settings, '\n');
  const std::vector<std::string> others = absl::StrSplit(other.settings, '\n');
  const auto fact = [](absl::string_view line) {
    return line.substr(0, line.find('\t'));
  };
  const auto told = [](const std::string& line) {
    return absl::StrReplaceAll(line, {{"\t", " "}});
  };
  if (lines.size() > 1 && others.size() > 1) {
    for (size_t i = 0; i < std::min(lines.size(), others.size()); ++i) {
      if (fact(lines[i]) != fact(others[i])) {
        return {told(lines[i]), told(others[i])};
      }
    }
    if (lines.size() == others.size()) return {};
  }
  const std::string all = Describe(), of_other = other.Describe();
  if (all == of_other) return {};
  return {all, of_other};
}

double NowSecs() {
  const std::chrono::duration<double> now =
      std::chrono::steady_clock::now().time_since_epoch();
  return now.count();
}

namespace {

// All rounds of the process: their managers, containers and names. New rounds
// may have the name of some that a kernel has not yet released.
struct Listed {
  std::mutex mu;
  std::multiset<
      std::tuple<tensorflow::ResourceMgr*, std::string, std::string>>
      rounds;

  static Listed& Get() {
    static Listed* const listed = new Listed;
    return *listed;
  }
};

}  // namespace

RoundsResource::RoundsResource(tensorflow::ResourceMgr* manager,
                               const std::string& container,
                               const std::string& name,
                               const RoundsOptions& options)
    : manager_(manager),
      container_(container),
      name_(name),
      options_(options),
      id_(static_cast<int64_t>(tensorflow::random::New64() >> 2) + 1),
      used_(NowSecs()),
      rounds_(std::make_shared<TensorRounds>(
          name, options.num_workers, &DeadlineTimer::Get(),
          [](const std::string& text) { LOG(WARNING) << text; })) {
  Listed& listed = Listed::Get();
  std::lock_guard<std::mutex> lock(listed.mu);
  listed.rounds.emplace(manager_, container_, name_);
}

RoundsResource::~RoundsResource() {
  rounds_->End();
  Listed& listed = Listed::Get();
  std::lock_guard<std::mutex> lock(listed.mu);
  listed.rounds.erase(listed.rounds.find({manager_, container_, name_}));
}

std::map<std::string, RoundsPtr> RoundsResource::List(
    tensorflow::ResourceMgr* manager) {
  std::set<std::string> names;
  {
    Listed& listed = Listed::Get();
    std::lock_guard<std::mutex> lock(listed.mu);
    for (const auto& [of, container, name] : listed.rounds) {
      if (of == manager && container == manager->default_container()) {
        names.insert(name);
      }
    }
  }
  std::map<std::string, RoundsPtr> found;
  for (const std::string& name : names) {
    RoundsResource* rounds;
    if (!manager->Lookup(manager->default_container(), name, &rounds).ok()) {
      continue;
    }
    RoundsPtr owned(rounds);
    if (owned->options().holds_center) found[name] = std::move(owned);
  }
  return found;
}

double RoundsResource::idle_secs() const { return NowSecs() - used_; }
void RoundsResource::Use() { used_ = NowSecs(); }

absl::Status ReadWorker(OpKernelContext* ctx, std::string* worker) {
  tstring name;
  TF_RETURN_IF_ERROR(ReadScalar(ctx, "worker", &name));
  *worker = name;
  return absl::OkStatus();
}

namespace {

absl::Status CheckRound(int64_t round) {
  // Round + 1 must not overflow.
  if (round < kLastRound) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("round must be less than 2^63 - 1, got ", round));
}

}  // namespace

absl::Status ReadPlace(OpKernelContext* ctx, Place* place) {
  const Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->input("place", &tensor));
  TF_RETURN_IF_ERROR(CheckPlace(tensor->shape()));
  const auto numbers = tensor->vec<int64_t>();
  *place = {numbers(0), numbers(1)};
  return CheckRound(place->round);
}

absl::Status ReadKnown(OpKernelContext* ctx, Known* known) {
  const Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->input("known", &tensor));
  TF_RETURN_IF_ERROR(CheckKnown(tensor->shape()));
  const auto texts = tensor->vec<tstring>();
  std::vector<int64_t> numbers;
  bool are_numbers = texts.size() > 0;
  if (are_numbers) {
    for (const absl::string_view text :
         absl::StrSplit(absl::string_view(texts(0)), ' ')) {
      numbers.emplace_back();
      are_numbers &= absl::SimpleAtoi(text, &numbers.back());
    }
  }
  if (!are_numbers || numbers.size() < 5) {
    return absl::InvalidArgumentError(absl::StrCat(
        "known must be what an averaging op has told, 5 or more numbers and ",
        "names, got ",
        texts.size() == 0 ? "none"
                          : absl::CHexEscape(std::string(texts(0)))));
  }
  known->place = {numbers[0], numbers[1]};
  known->closed = numbers[2] != 0;
  known->turn = numbers[3];
  known->turns.newest = numbers[4];
  known->turns.alive = {numbers.begin() + 5, numbers.end()};
  std::set<std::string> named;
  for (int64_t w = 1; w < texts.size(); ++w) {
    if (named.insert(texts(w)).second) known->workers.push_back(texts(w));
  }
  return CheckRound(known->place.round);
}

absl::Status WritePlace(OpKernelContext* ctx, const Place& place) {
  Tensor* output;
  TF_RETURN_IF_ERROR(ctx->allocate_output("place", {2}, &output));
  output->vec<int64_t>()(0) = place.round;
  output->vec<int64_t>()(1) = place.generation;
  return absl::OkStatus();
}

absl::Status WriteKnown(OpKernelContext* ctx, const char* name,
                        const Known& known) {
  Tensor* output;
  const int64_t m = known.workers.size() + known.without_values.size();
  TF_RETURN_IF_ERROR(ctx->allocate_output(name, {1 + m}, &output));
  std::string numbers =
      absl::StrCat(known.place.round, " ", known.place.generation, " ",
                   known.closed, " ", known.turn, " ", known.turns.newest);
  for (const int64_t turn : known.turns.alive) {
    absl::StrAppend(&numbers, " ", turn);
  }
  auto texts = output->vec<tstring>();
  texts(0) = numbers;
  // Those without values come twice.
  std::copy(known.without_values.begin(), known.without_values.end(),
            std::copy(known.workers.begin(), known.workers.end(),
                      texts.data() + 1));
  return absl::OkStatus();
}

namespace {

// Moves the mean by one worker's values.
absl::Status AddToMean(OpKernelContext* ctx, Isa isa,
                       const TensorRounds::Member& member,
                       const RoundsOptions& options, Center* center) {
  center->weight += member.weight;
  const double rate = member.weight / center->weight;
  const bool is_first = center->mean.empty();
  center->mean.resize(member.values.size());
  for (size_t i = 0; i < member.values.size(); ++i) {
    const Tensor& value = member.values[i];
    Tensor& mean = center->mean[i];
    const tensorflow::DataType dtype = options.dtypes[i];
    if (is_first && value.dtype() == dtype) {
      mean = value;
      continue;
    }
    if (is_first) {
      TF_RETURN_IF_ERROR(Zeros(ctx, dtype, {options.sizes[i]}, &mean));
    }
    if (value.dtype() == tensorflow::DT_UINT8) {
      Decode(ctx, *options.travels, isa, mean, value, &rate, &mean);
      continue;
    }
    const Number from = NumberOf(value.dtype()), to = NumberOf(dtype);
    Pass pass;
    pass.AddStage({FindStep(RuleId::kEma, to, from, isa), &rate, 2,
                   SizeOf(from) + 2 * SizeOf(to), /*new_inputs=*/true});
    pass.AddVariable(mean.NumElements(), {mean.data(), value.data()});
    TF_RETURN_IF_ERROR(RunPass(ctx, pass));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AddToMean(OpKernelContext* ctx, Isa isa,
                       RoundsResource* resource) {
  Center* const center = resource->center();
  for (const TensorRounds::Member& member : resource->rounds()->TakeValues()) {
    const absl::Status added =
        AddToMean(ctx, isa, member, resource->options(), center);
    if (added.ok()) continue;
    // Without memory for the mean, the round cannot end here: workers restore
    // the center of a server that has none.
    center->Forget();
    return added;
  }
  return absl::OkStatus();
}

}  // namespace wrapopt
