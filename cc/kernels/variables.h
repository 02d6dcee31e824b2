// The variables that an op reads and writes: found, locked, checked and made
// writable in one place, for resource and for ref variables alike.
//
// A kernel goes through the same steps, and writes nothing before the last of
// them has passed:
//
//   Variables variables(ctx, &memory_);
//   Find(list, access) for each input list
//   Lock()
//   CheckDtype(), CheckSameShape(), and what else the op asks for
//   PrepareToWrite()
//   ... data(variable) ...
#ifndef WRAPOPT_CC_KERNELS_VARIABLES_H_
#define WRAPOPT_CC_KERNELS_VARIABLES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/kernels/contracts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/mutex.h"

namespace wrapopt {

class Variables final : public CheckedVariables {
 public:
  // kWriteUnlocked lets other updates in at the same time, as TensorFlow's
  // use_locking=False does: what the variables hold is then up to luck, but
  // always some update's.
  //
  // kReadWritten reads what may be among the written ones, too: such a variable
  // is locked once, for writing, and both names stand for the one buffer.
  enum class Access { kRead, kReadWritten, kWrite, kWriteUnlocked };

  // What a kernel remembers of its handles from one call to the next. With
  // hundreds of small variables, most of a call's time went into following
  // handles that lie scattered in memory, and into sorting variables for Lock().
  // The variables themselves are looked up each time: one may have been
  // destroyed, and another made under its name, while a step still holds it.
  class Memory {
   private:
    friend class Variables;

    // One that names a variable of this device.
    struct Handle {
      // Holds the buffer, so that the handle's address stays its own.
      tensorflow::Tensor tensor;
      const tensorflow::ResourceHandle* handle = nullptr;
      std::string container;
      std::string name;
    };

    tensorflow::mutex mu_;
    // By input of the op, and after them, by element of a bundle.
    std::vector<Handle> handles_ TF_GUARDED_BY(mu_);
    std::vector<int> order_ TF_GUARDED_BY(mu_);       // For Lock().
  };

  // Calls that run at the same time do not wait for each other's memory.
  Variables(tensorflow::OpKernelContext* ctx, Memory* memory)
      : ctx_(ctx),
        memory_(memory->mu_.try_lock() ? memory : nullptr) {}
  ~Variables();
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

  // Finds the variables of one input list. Their positions in all calls of
  // this class are `first(list)` + position in the list.
  absl::Status Find(const char* list, Access access, int* first);

  // The same for variables that are to be written and that nobody has to make or
  // to initialize: what has no value yet is all zeros.
  absl::Status FindOrMake(const char* list, Access access,
                          tensorflow::DataType dtype, int* first);

  // The same for an op that takes all of its lists as one bundle: the vector
  // `handles`, of which these are the next `count`.
  absl::Status FindInBundle(const char* list, int count, Access access,
                            int* first);

  // Locks all of them, those that are only read in shared mode, in the order
  // of their mutex's address: the order that TensorFlow's own training kernels
  // use, so that the two cannot deadlock. A variable that is written must not
  // be named twice, but for kReadWritten, and each must be initialized.
  absl::Status Lock();

  // From here on, dtype() and shape() too.
  int Written(int variable) const override {
    return entries_[variable].written;
  }

  // Whether a variable of `FindOrMake` has a value yet. Another has one.
  bool has_value(int variable) const { return entries_[variable].has_value; }
  // Which shape a variable of `FindOrMake` must have. It is written later.
  absl::Status CheckShape(int variable, const tensorflow::TensorShape& shape);

  // Gives each written variable a buffer that no reader shares. Call it last:
  // it is the first to change anything, though no value.
  absl::Status PrepareToWrite();

  // The same for one variable, whatever handle or name it was found by, and
  // different for two that are alive.
  const void* Identity(int variable) const { return entries_[variable].mu; }

  // A handle knows its variable's name. Those of ref variables may be in the
  // op's attribute "_variables", in the order in which they were found; else
  // they are what the op's inputs are called.
  std::string Describe(int variable) const override;

  tensorflow::DataType dtype(int variable) const override {
    return entries_[variable].tensor->dtype();
  }
  const tensorflow::TensorShape& shape(int variable) const override {
    return entries_[variable].tensor->shape();
  }
  tensorflow::Tensor* tensor(int variable) {
    return entries_[variable].tensor;
  }
  void* data(int variable) { return entries_[variable].tensor->data(); }
  int64_t size(int variable) const {
    return entries_[variable].tensor->NumElements();
  }

  // For an op that swaps buffers instead of writing to them: Prepare for all
  // pairs first, then Swap. Both variables are of one dtype and shape.
  absl::Status PrepareToSwap(int a, int b);
  void Swap(int a, int b);

 private:
  using VarPtr = tensorflow::core::RefCountPtr<tensorflow::Var>;

  struct Entry {
    const char* list;
    int position;
    int input;
    int element;  // Of a bundle; else 0.
    Access access;
    tensorflow::mutex* mu;
    // Of a resource variable; a ref variable has none.
    VarPtr var;
    // Of a ref variable: another name for its buffer.
    tensorflow::Tensor ref;
    // The variable's own tensor, or `ref`.
    tensorflow::Tensor* tensor = nullptr;
    int written = -1;
    // Of `FindOrMake`: its dtype, and the shape that it is to have.
    std::optional<tensorflow::DataType> made_of;
    tensorflow::TensorShape made_shape;
    bool has_value = true;
  };

  // Whether a reader that is still alive holds the buffer of a variable that
  // is to be written.
  static bool IsShared(const Entry& entry);
  absl::Status Find(const char* list, Access access,
                    std::optional<tensorflow::DataType> made_of, int* first);
  // Finds entry `first` and those after it, which are resource variables or ref
  // variables that are found already.
  absl::Status FindEach(int first);
  const tensorflow::ResourceHandle& handle(const Entry& entry) const;
  // Its place in the memory.
  size_t Place(const Entry& entry) const;
  // The handle of an entry if it is the one of the call before.
  const Memory::Handle* Remembered(const Entry& entry) const;
  absl::Status FindResource(Entry* entry);
  // The order for Lock(): all entries by their mutex, and of one mutex, the one
  // first that says how it is locked.
  absl::Status OrderLocks(std::vector<int>* order) const;
  // The first two neighbours that are not in that order, or that name one
  // variable when only one of them may.
  std::vector<int>::const_iterator FirstConflict(
      const std::vector<int>& order) const;
  void LeaveMemory();
  void LockEach(const std::vector<int>& order);
  void Unlock();
  absl::Status Copy(Entry& entry);
  absl::Status MakeZeros(Entry& entry);

  tensorflow::OpKernelContext* const ctx_;
  Memory* memory_;  // Locked; nullptr where there is none (any more).
  int bundled_ = 0;  // Elements of the bundle that are found.
  std::vector<Entry> entries_;
  std::vector<int> locked_;  // In the order of locking.
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_VARIABLES_H_
