#include "cc/kernels/variables.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/gpu.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::OpKernel;
using tensorflow::Tensor;
using tensorflow::Var;

namespace {

template <class T>
void Increment(Tensor* count) {
  T& x = count->scalar<T>()();
  if constexpr (std::is_integral_v<T>) {
    // It wraps around on overflow, as in TensorFlow.
    x = static_cast<T>(static_cast<std::make_unsigned_t<T>>(x) + 1u);
  } else {
    x = x + T(1);
  }
}

}  // namespace

void (*IncrementOf(tensorflow::DataType dtype))(Tensor*) {
  switch (dtype) {
#define WRAPOPT_CASE(T)                      \
  case tensorflow::DataTypeToEnum<T>::value: \
    return Increment<T>;
    TF_CALL_REAL_NUMBER_TYPES(WRAPOPT_CASE)
#undef WRAPOPT_CASE
    default:
      return nullptr;
  }
}

Variables::~Variables() {
  Unlock();
  LeaveCache();
}

void Variables::LeaveCache() {
  if (lookup_cache_ != nullptr) lookup_cache_->mu_.unlock();
  lookup_cache_ = nullptr;
}

absl::Status Variables::Find(const char* list, Access access, int* first) {
  return Find(list, access, std::nullopt, first);
}

absl::Status Variables::FindOrMake(const char* list, Access access,
                                   tensorflow::DataType dtype, int* first) {
  return Find(list, access, dtype, first);
}

absl::Status Variables::Find(const char* list, Access access,
                             std::optional<tensorflow::DataType> made_of,
                             int* first) {
  int start, stop;
  TF_RETURN_IF_ERROR(ctx_->op_kernel().InputRange(list, &start, &stop));
  *first = entries_.size();
  // Lock() keeps pointers into the entries, which must not move after this.
  entries_.reserve(entries_.size() + (stop - start));
  for (int input = start; input < stop; ++input) {
    entries_.push_back({list, input - start, input, /*element=*/0, access});
    Entry& entry = entries_.back();
    entry.made_of = made_of;
    if (ctx_->input_is_ref(input)) {
      entry.mu = ctx_->input_ref_mutex(input);
    } else if (const Tensor& tensor = ctx_->input(input);
               tensor.NumElements() != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          entry.list, "[", entry.position, "] must be one resource handle, ",
          "got a tensor of shape ", tensor.shape().DebugString()));
    }
  }
  return FindEach(*first);
}

absl::Status Variables::Find(const std::vector<VariableList>& lists,
                             Access access) {
  int start, stop;
  TF_RETURN_IF_ERROR(
      ctx_->op_kernel().InputRange("variables", &start, &stop));
  const auto handles = [this](int input) -> int64_t {
    return ctx_->input_is_ref(input) ? 1 : ctx_->input(input).NumElements();
  };
  int64_t count = 0;
  for (int input = start; input < stop; ++input) count += handles(input);
  TF_RETURN_IF_ERROR(CheckCount(lists, count));
  entries_.reserve(count);
  int input = start, element = 0;
  for (const VariableList& list : lists) {
    for (int i = 0; i < list.count; ++i, ++element) {
      for (; element == handles(input); element = 0) ++input;
      entries_.push_back({list.name, i, input, element,
                          list.is_read ? Access::kRead : access});
      Entry& entry = entries_.back();
      if (list.made_of != tensorflow::DT_INVALID) entry.made_of = list.made_of;
      if (ctx_->input_is_ref(input)) entry.mu = ctx_->input_ref_mutex(input);
    }
  }
  return FindEach(/*first=*/0);
}

absl::Status Variables::FindEach(int first) {
  if (lookup_cache_ != nullptr &&
      lookup_cache_->handles_.size() < entries_.size()) {
    lookup_cache_->handles_.resize(entries_.size());
  }
  std::vector<int> known;
  std::vector<std::pair<const std::string*, const std::string*>> names;
  for (size_t i = first; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (ctx_->input_is_ref(entry.input)) continue;
    if (const LookupCache::Handle* handle = Cached(entry)) {
      known.push_back(i);
      names.push_back({&handle->container, &handle->name});
    } else {
      TF_RETURN_IF_ERROR(FindResource(&entry));
      entry.mu = entry.var->mu();
    }
  }
  std::vector<VarPtr> found;
  TF_RETURN_IF_ERROR(ctx_->resource_manager()->LookupMany<Var>(names, &found));
  for (size_t k = 0; k < known.size(); ++k) {
    Entry& entry = entries_[known[k]];
    entry.var = std::move(found[k]);
    if (entry.var == nullptr) {
      if (!entry.made_of) return NotInitialized(known[k]);
      TF_RETURN_IF_ERROR(FindResource(&entry));
    }
    entry.mu = entry.var->mu();
  }
  return absl::OkStatus();
}

const tensorflow::ResourceHandle& Variables::handle(const Entry& entry) const {
  return static_cast<const tensorflow::ResourceHandle*>(
      ctx_->input(entry.input).data())[entry.element];
}

const Variables::LookupCache::Handle* Variables::Cached(
    const Entry& entry) const {
  if (lookup_cache_ == nullptr) return nullptr;
  const LookupCache::Handle& cached =
      lookup_cache_->handles_[&entry - entries_.data()];
  return &handle(entry) == cached.handle ? &cached : nullptr;
}

absl::Status Variables::FindResource(Entry* entry) {
  const tensorflow::ResourceHandle& handle = this->handle(*entry);
  const absl::Status found =
      entry->made_of
          ? tensorflow::LookupOrCreateResource<Var>(ctx_, handle, &entry->var,
                                        [entry](Var** var) {
                                          *var = new Var(*entry->made_of);
                                          return absl::OkStatus();
                                        })
          : LookupResource(ctx_, handle, &entry->var);
  const int variable = entry - entries_.data();
  if (absl::IsNotFound(found)) return NotInitialized(variable);
  if (!found.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Describe(variable),
                     " is not a variable of this device: ", found.message()));
  }
  // A ref-counting handle has a pointer to its variable, and a copy of it would
  // keep the variable alive.
  if (lookup_cache_ != nullptr && !handle.IsRefCounting()) {
    lookup_cache_->handles_[variable] = {
        ctx_->input(entry->input), &handle, handle.container(), handle.name()};
  }
  return absl::OkStatus();
}

namespace {

bool IsWritten(Variables::Access access) {
  return access == Variables::Access::kWrite ||
         access == Variables::Access::kWriteUnlocked;
}

// The rank of an access among several accesses of one variable.
int Rank(Variables::Access access) {
  if (IsWritten(access)) return 0;
  return access == Variables::Access::kRead ? 1 : 2;
}

}  // namespace

absl::Status Variables::OrderLocks(std::vector<int>* order) const {
  order->resize(entries_.size());
  std::iota(order->begin(), order->end(), 0);
  std::stable_sort(order->begin(), order->end(), [this](int a, int b) {
    const Entry& x = entries_[a];
    const Entry& y = entries_[b];
    return x.mu == y.mu ? Rank(x.access) < Rank(y.access)
                        : std::less<>()(x.mu, y.mu);
  });
  const auto conflict = FirstConflict(*order);
  if (conflict == order->end()) return absl::OkStatus();
  return NamedTwice(conflict[0], conflict[1]);
}

std::vector<int>::const_iterator Variables::FirstConflict(
    const std::vector<int>& order) const {
  return std::adjacent_find(order.begin(), order.end(), [this](int a, int b) {
    const Entry& x = entries_[a];
    const Entry& y = entries_[b];
    if (x.mu != y.mu) return std::less<>()(y.mu, x.mu);
    if (IsWritten(x.access)) return y.access != Access::kReadWritten;
    return Rank(x.access) > Rank(y.access);
  });
}

absl::Status Variables::Lock() {
  // Check that no lock is taken twice before the first is taken.
  std::vector<int> order;
  if (lookup_cache_ != nullptr &&
      lookup_cache_->order_.size() == entries_.size() &&
      FirstConflict(lookup_cache_->order_) == lookup_cache_->order_.end()) {
    order = lookup_cache_->order_;
  } else {
    TF_RETURN_IF_ERROR(OrderLocks(&order));
    if (lookup_cache_ != nullptr) lookup_cache_->order_ = order;
  }
  LeaveCache();
  int first = -1;  // The first entry of the same mutex.
  size_t kept = 0;
  for (const int i : order) {
    if (first < 0 || entries_[first].mu != entries_[i].mu) {
      order[kept++] = first = i;
    } else if (IsWritten(entries_[first].access)) {
      entries_[i].written = first;
    }
  }
  order.resize(kept);
  LockEach(order);
  // A shared buffer must be replaced, which needs the exclusive lock.
  if (std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
        return entry.access == Access::kWriteUnlocked && IsShared(entry);
      })) {
    Unlock();
    for (Entry& entry : entries_) {
      if (entry.access == Access::kWriteUnlocked) entry.access = Access::kWrite;
    }
    LockEach(order);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (entry.var != nullptr) {
      entry.tensor = entry.var->tensor();
      entry.has_value = entry.var->is_initialized;
    } else {
      entry.ref = ctx_->mutable_input(entry.input, /*lock_held=*/true);
      entry.tensor = &entry.ref;
      entry.has_value = entry.ref.IsInitialized();
    }
    if (!entry.has_value && !entry.made_of) return NotInitialized(i);
  }
  return absl::OkStatus();
}

void Variables::LockEach(const std::vector<int>& order) {
  locked_.reserve(order.size());
  for (const int i : order) {
    if (entries_[i].access == Access::kWrite) {
      entries_[i].mu->lock();
    } else {
      entries_[i].mu->lock_shared();
    }
    locked_.push_back(i);
  }
}

void Variables::Unlock() {
  for (auto i = locked_.rbegin(); i != locked_.rend(); ++i) {
    if (entries_[*i].access == Access::kWrite) {
      entries_[*i].mu->unlock();
    } else {
      entries_[*i].mu->unlock_shared();
    }
  }
  locked_.clear();
}

bool Variables::IsShared(const Entry& entry) {
  // A ref variable keeps its buffer. A resource variable in copy-on-read mode
  // does not share its buffer. In other modes, each reader holds a reference.
  return entry.var != nullptr && !entry.var->tensor()->RefCountIsOne();
}

absl::Status Variables::Copy(const Tensor& from, Tensor* to) const {
  tensorflow::AllocatorAttributes attributes;
  // TensorFlow allocates variables' buffers with the same attributes.
  attributes.set_gpu_compatible(true);
  attributes.set_nic_compatible(true);
  TF_RETURN_IF_ERROR(
      ctx_->allocate_temp(from.dtype(), from.shape(), to, attributes));
  if (IsOnGpu(ctx_)) return CopyOnGpu(ctx_, from, to);
  if (to->TotalBytes() > 0) {
    std::memcpy(to->data(), from.data(), to->TotalBytes());
  }
  return absl::OkStatus();
}

absl::Status Variables::Copy(Entry& entry) {
  Tensor copy;
  TF_RETURN_IF_ERROR(Copy(*entry.tensor, &copy));
  *entry.tensor = std::move(copy);
  return absl::OkStatus();
}

absl::Status Variables::Read(int variable, Tensor* value) {
  const Entry& entry = entries_[variable];
  if (entry.var != nullptr && entry.var->copy_on_read_mode.load()) {
    return Copy(*entry.tensor, value);
  }
  *value = *entry.tensor;
  return absl::OkStatus();
}

absl::Status Variables::MakeZeros(Entry& entry) {
  TF_RETURN_IF_ERROR(ctx_->allocate_temp(*entry.made_of, entry.made_shape,
                                         entry.tensor));
  if (IsOnGpu(ctx_)) {
    TF_RETURN_IF_ERROR(ZeroOnGpu(ctx_, entry.tensor));
  } else if (entry.tensor->TotalBytes() > 0) {
    std::memset(entry.tensor->data(), 0, entry.tensor->TotalBytes());
  }
  entry.var->is_initialized = true;
  entry.has_value = true;
  return absl::OkStatus();
}

absl::Status Variables::PrepareToWrite() {
  for (Entry& entry : entries_) {
    if (!entry.has_value) {
      TF_RETURN_IF_ERROR(MakeZeros(entry));
      continue;
    }
    if (entry.access == Access::kWrite && !entry.is_left && IsShared(entry)) {
      TF_RETURN_IF_ERROR(Copy(entry));
    }
  }
  return absl::OkStatus();
}

std::string Variables::Describe(int variable) const {
  const Entry& entry = entries_[variable];
  const std::string where =
      absl::StrCat(entry.list, "[", entry.position, "]");
  if (ctx_->input_is_ref(entry.input)) {
    // In a tf.cond of control flow v1 the input is a Switch.
    const OpKernel& op = ctx_->op_kernel();
    std::vector<std::string> names;
    const bool told =
        tensorflow::TryGetNodeAttr(op.def(), "_variables", &names) &&
        variable < static_cast<int>(names.size());
    return absl::StrCat(
        where, " (variable '",
        told ? names[variable] : op.requested_input(entry.input), "')");
  }
  return absl::StrCat(where, " (variable '", handle(entry).name(), "')");
}

absl::Status Variables::PrepareToExchange(int a, int b) {
  TF_RETURN_IF_ERROR(PrepareToMove(a, b));
  return PrepareToMove(b, a);
}

void Variables::Exchange(int a, int b) {
  std::swap(*entries_[a].tensor, *entries_[b].tensor);
  ReplaceRef(a);
  ReplaceRef(b);
}

absl::Status Variables::PrepareToMove(int from, int to) {
  // A variable in copy-on-read mode must not get a buffer that readers of the
  // other variable hold.
  const Entry& target = entries_[to];
  if (target.var != nullptr && target.var->copy_on_read_mode.load() &&
      !entries_[from].tensor->RefCountIsOne()) {
    return Copy(entries_[from]);
  }
  return absl::OkStatus();
}

absl::Status Variables::CheckDeclared(int to, int from) const {
  if (entries_[to].var == nullptr) return absl::OkStatus();
  for (const auto& declared : handle(entries_[to]).dtypes_and_shapes()) {
    if (declared.dtype != dtype(from)) {
      return absl::InvalidArgumentError(absl::StrCat(
          Describe(to), " must be of dtype ",
          tensorflow::DataTypeString(dtype(from)), " (the dtype of ",
          Describe(from), "), got ",
          tensorflow::DataTypeString(declared.dtype)));
    }
    TF_RETURN_IF_ERROR(wrapopt::CheckShape(
        Describe(to), declared.shape, shape(from),
        absl::StrCat("the shape of ", Describe(from))));
  }
  return absl::OkStatus();
}

void Variables::Move(int from, int to) {
  Entry& source = entries_[from];
  Entry& target = entries_[to];
  *target.tensor = *source.tensor;
  if (target.var != nullptr) target.var->is_initialized = true;
  if (source.var != nullptr) {
    // With this dtype and no value, TensorFlow refuses to read the variable and
    // allows to assign it.
    *source.tensor = Tensor(tensorflow::DT_INVALID);
    source.var->is_initialized = false;
  } else {
    // TensorFlow refuses to read a ref variable without a buffer, unless it is
    // empty.
    source.ref = Tensor(source.ref.dtype(), source.ref.shape(),
                        /*buf=*/nullptr);
  }
  ReplaceRef(from);
  ReplaceRef(to);
}

void Variables::ReplaceRef(int variable) {
  const Entry& entry = entries_[variable];
  if (entry.var != nullptr) return;
  ctx_->replace_ref_input(entry.input, entry.ref, /*lock_held=*/true);
}

}  // namespace wrapopt
