// Finds, locks and checks the variables that an op reads and writes, and makes
// them writable. Resource and ref variables have the same interface.
//
// A kernel takes these steps, and writes nothing before all have succeeded:
//
//   Variables variables(ctx, &lookup_cache_);
//   Find(list, access) for each input list, or Find(lists, access)
//   Lock()
//   CheckDtype(), CheckSameShape(), and the op's other checks
//   PrepareToWrite()
//   ... data(variable) ...
#ifndef WRAPOPT_CC_KERNELS_VARIABLES_H_
#define WRAPOPT_CC_KERNELS_VARIABLES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/ops/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/mutex.h"

namespace wrapopt {

class Variables final : public CheckedVariables {
 public:
  // kWriteUnlocked allows concurrent updates, like TensorFlow's
  // use_locking=False: each element then has the value of one of the updates.
  //
  // kReadWritten reads variables that may also be among the written ones. Such
  // a variable is locked once, for writing, and both entries share its buffer.
  enum class Access { kRead, kReadWritten, kWrite, kWriteUnlocked };

  // A kernel's cache of handles and of their order, from one call to the next.
  // With hundreds of small variables, most of a call's time went into reading
  // handles that are scattered in memory, and into sorting variables for
  // Lock(). The variables themselves are looked up in each call: one may have
  // been destroyed, and another made under its name, while a step still holds
  // it.
  class LookupCache {
   private:
    friend class Variables;

    // The handle of a variable of this device.
    struct Handle {
      // Keeps the buffer, so that no other handle gets the same address.
      tensorflow::Tensor tensor;
      const tensorflow::ResourceHandle* handle = nullptr;
      std::string container;
      std::string name;
    };

    tensorflow::mutex mu_;
    // In the order of the calls of Find.
    std::vector<Handle> handles_ TF_GUARDED_BY(mu_);
    std::vector<int> order_ TF_GUARDED_BY(mu_);  // For Lock().
  };

  // A concurrent call that holds the cache makes this one work without it.
  Variables(tensorflow::OpKernelContext* ctx, LookupCache* cache)
      : ctx_(ctx), lookup_cache_(cache->mu_.try_lock() ? cache : nullptr) {}
  ~Variables();
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

  // Finds the variables of one input list. Their positions in all calls of
  // this class are `first(list)` + position in the list.
  absl::Status Find(const char* list, Access access, int* first);

  // The same for written variables that need not exist or be initialized. In
  // PrepareToWrite(), a variable without a value becomes zeros.
  absl::Status FindOrMake(const char* list, Access access,
                          tensorflow::DataType dtype, int* first);

  // Finds the variables of the input "variables", in its order. `access` is
  // that of the written ones.
  absl::Status Find(const std::vector<VariableList>& lists, Access access);

  // Locks all variables, in shared mode if they are only read, in the order of
  // their mutexes' addresses. TensorFlow's training kernels use the same order,
  // so the two cannot deadlock. Each variable must be initialized. A written
  // variable must not be named twice, except by kReadWritten.
  absl::Status Lock();

  // Valid after Lock(), like dtype() and shape().
  int Written(int variable) const override {
    return entries_[variable].written;
  }

  // Whether a variable has a value; false only for some of `FindOrMake`.
  bool has_value(int variable) const { return entries_[variable].has_value; }
  // Sets the shape that a variable of `FindOrMake` gets if it has no value.
  void SetShape(int variable, const tensorflow::TensorShape& shape) {
    entries_[variable].made_shape = shape;
  }

  // Says that a variable of a written list is not written in this call:
  // PrepareToWrite() does not copy it then.
  void Leave(int variable) { entries_[variable].is_left = true; }

  // Gives each written variable a buffer that no reader shares. Call it after
  // all checks: it is the first call with an effect on variables, though it
  // changes no value.
  absl::Status PrepareToWrite();

  // nullptr for a ref variable.
  tensorflow::Var* resource(int variable) const {
    return entries_[variable].var.get();
  }

  // A pointer that identifies a variable, whatever handle or name found it.
  const void* Identity(int variable) const { return entries_[variable].mu; }

  // The name is that in the handle. For a ref variable it is in the op's
  // attribute "_variables", in the order of the calls of Find, if the op has
  // it; else it is the name of the op's input.
  std::string Describe(int variable) const override;

  tensorflow::DataType known_dtype(int variable) const override {
    return entries_[variable].has_value ? dtype(variable)
                                        : *entries_[variable].made_of;
  }
  const tensorflow::PartialTensorShape& known_shape(
      int variable) const override {
    static const auto& unknown = *new tensorflow::PartialTensorShape;
    if (!entries_[variable].has_value) return unknown;
    return shape(variable);
  }
  tensorflow::DataType dtype(int variable) const {
    return entries_[variable].tensor->dtype();
  }
  const tensorflow::TensorShape& shape(int variable) const {
    return entries_[variable].tensor->shape();
  }
  tensorflow::Tensor* tensor(int variable) {
    return entries_[variable].tensor;
  }
  void* data(int variable) { return entries_[variable].tensor->data(); }
  int64_t size(int variable) const {
    return entries_[variable].tensor->NumElements();
  }

  // The value of a variable, for an output: it shares the buffer, unless
  // TensorFlow writes to the buffers of that variable in place.
  absl::Status Read(int variable, tensorflow::Tensor* value);

  // For an op that exchanges buffers instead of writing to them: call
  // PrepareToExchange for all pairs, then Exchange. The two must have the same
  // dtype and shape.
  absl::Status PrepareToExchange(int a, int b);
  void Exchange(int a, int b);

  // For an op that moves the buffer of `from` to `to`, a variable of
  // `FindOrMake`, and leaves `from` without a value: call PrepareToMove for all
  // pairs, then Move.
  absl::Status PrepareToMove(int from, int to);
  // Checks that the handle of `to` is for the dtype and shape of `from`.
  absl::Status CheckDeclared(int to, int from) const;
  void Move(int from, int to);

 private:
  using VarPtr = tensorflow::core::RefCountPtr<tensorflow::Var>;

  struct Entry {
    absl::string_view list;
    int position;
    int input;
    int element;  // The index in a tensor of several handles; else 0.
    Access access;
    tensorflow::mutex* mu;
    // The resource variable; nullptr for a ref variable.
    VarPtr var;
    // The tensor of a ref variable, which shares its buffer.
    tensorflow::Tensor ref;
    // The tensor of `var`, or `ref`.
    tensorflow::Tensor* tensor = nullptr;
    int written = -1;
    // For `FindOrMake`: the dtype and shape of the new variable.
    std::optional<tensorflow::DataType> made_of;
    tensorflow::TensorShape made_shape;
    bool has_value = true;
    bool is_left = false;  // See Leave().
  };

  // Whether a reader holds the buffer of a variable to write.
  static bool IsShared(const Entry& entry);
  absl::Status Find(const char* list, Access access,
                    std::optional<tensorflow::DataType> made_of, int* first);
  // Finds the resource variables among entry `first` and those after it.
  absl::Status FindEach(int first);
  const tensorflow::ResourceHandle& handle(const Entry& entry) const;
  // The cached handle of an entry, or nullptr if the handle is another one.
  const LookupCache::Handle* Cached(const Entry& entry) const;
  absl::Status FindResource(Entry* entry);
  // The order for Lock(): by mutex. Of several entries with one mutex, the
  // entry that determines the kind of lock is first.
  absl::Status OrderLocks(std::vector<int>* order) const;
  // The first two neighbours that are out of this order, or that must not name
  // the same variable but do.
  std::vector<int>::const_iterator FirstConflict(
      const std::vector<int>& order) const;
  void LeaveCache();
  void LockEach(const std::vector<int>& order);
  void Unlock();
  absl::Status Copy(const tensorflow::Tensor& from,
                    tensorflow::Tensor* to) const;
  absl::Status Copy(Entry& entry);
  absl::Status MakeZeros(Entry& entry);
  // Gives a ref variable the tensor of its entry.
  void ReplaceRef(int variable);

  tensorflow::OpKernelContext* const ctx_;
  LookupCache* lookup_cache_;  // Locked by this call, or nullptr.
  std::vector<Entry> entries_;
  std::vector<int> locked_;  // In the order of locking.
};

// A function that adds 1 to a scalar; nullptr if its dtype is not of real
// numbers.
void (*IncrementOf(tensorflow::DataType dtype))(tensorflow::Tensor*);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_VARIABLES_H_
