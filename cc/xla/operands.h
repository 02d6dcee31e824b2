// The operands of a call of an XLA program.
#ifndef WRAPOPT_CC_XLA_OPERANDS_H_
#define WRAPOPT_CC_XLA_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cc/engine/number.h"
#include "xla/ffi/api/ffi.h"

namespace wrapopt {

namespace ffi = xla::ffi;

// A handler takes them one after the other, in the order of
// cc/xla/ffi_handlers.h. An operand of a wrong type sets the status.
class Operands {
 public:
  // Arrays of one number type.
  struct Arrays {
    Number number = Number::kFloat;
    std::vector<ffi::AnyBuffer> buffers;

    void* operator[](size_t i) const { return buffers[i].untyped_data(); }
    int64_t elements(size_t i) const { return buffers[i].element_count(); }
    // The first dimension of an array that has one.
    int64_t rows(size_t i) const { return buffers[i].dimensions()[0]; }
  };

  Operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& results)
      : args_(args), results_(results) {}

  const absl::Status& status() const { return status_; }
  // The number of operands that are not taken yet.
  size_t left() const { return args_.size() - next_; }

  const bool* Bool() {
    const std::optional<ffi::AnyBuffer> buffer = Take(ffi::PRED);
    return buffer ? static_cast<const bool*>(buffer->untyped_data()) : nullptr;
  }

  absl::Span<const double> Doubles() { return Vector<double>(ffi::F64); }
  absl::Span<const int64_t> Counts() { return Vector<int64_t>(ffi::S64); }

  // Takes `count` vectors of int32 or int64.
  std::vector<ffi::AnyBuffer> Indices(size_t count) {
    std::vector<ffi::AnyBuffer> indices;
    for (size_t i = 0; i < count; ++i) {
      const std::optional<ffi::AnyBuffer> buffer = Take();
      if (buffer) indices.push_back(*buffer);
    }
    return indices;
  }

  // Takes `count` arrays of one number type that the call only reads.
  Arrays Read(size_t count) {
    Arrays arrays;
    for (size_t i = 0; i < count; ++i) {
      const std::optional<ffi::AnyBuffer> buffer = Take();
      if (!buffer) return {};
      if (i == 0) arrays.number = NumberOf(buffer->element_type());
      arrays.buffers.push_back(*buffer);
    }
    return arrays;
  }

  // Takes `count` arrays that the call writes: they are also its next results.
  Arrays Written(size_t count) {
    Arrays arrays = Read(count);
    for (const ffi::AnyBuffer& buffer : arrays.buffers) {
      auto result = results_.get<ffi::AnyBuffer>(next_result_++);
      if (!result.has_value()) {
        status_.Update(absl::InternalError(result.error().message()));
        return {};
      }
      // XLA may give an empty array any address.
      if (buffer.size_bytes() > 0 &&
          (*result)->untyped_data() != buffer.untyped_data()) {
        status_.Update(absl::InternalError(
            absl::StrCat("XLA gave result ", next_result_ - 1,
                         " of a call another buffer than its operand")));
      }
    }
    return arrays;
  }

 private:
  template <class T>
  absl::Span<const T> Vector(ffi::DataType dtype) {
    const std::optional<ffi::AnyBuffer> buffer = Take(dtype);
    if (!buffer) return {};
    return {static_cast<const T*>(buffer->untyped_data()),
            buffer->element_count()};
  }

  std::optional<ffi::AnyBuffer> Take() {
    const auto buffer = args_.get<ffi::AnyBuffer>(next_);
    if (!buffer.has_value()) {
      status_.Update(absl::InternalError(buffer.error().message()));
      return std::nullopt;
    }
    ++next_;
    return *buffer;
  }

  std::optional<ffi::AnyBuffer> Take(ffi::DataType dtype) {
    const std::optional<ffi::AnyBuffer> buffer = Take();
    if (!buffer || buffer->element_type() == dtype) return buffer;
    status_.Update(absl::InternalError(absl::StrCat(
        "operand ", next_ - 1, " of a call must be of XLA's type ",
        static_cast<int>(dtype), ", got ",
        static_cast<int>(buffer->element_type()))));
    return std::nullopt;
  }

  Number NumberOf(ffi::DataType dtype) {
    switch (dtype) {
#define WRAPOPT_NUMBER_OF(number, storage, dtype, name, ffi_name) \
  case ffi::ffi_name:                                             \
    return Number::number;
      WRAPOPT_NUMBERS(WRAPOPT_NUMBER_OF)
#undef WRAPOPT_NUMBER_OF
      default:
        status_.Update(absl::InternalError(absl::StrCat(
            "operand ", next_ - 1, " of a call must be of a number type, ",
            "got XLA's type ", static_cast<int>(dtype))));
        return Number::kFloat;
    }
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& results_;
  absl::Status status_;
  size_t next_ = 0;
  size_t next_result_ = 0;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_XLA_OPERANDS_H_
