// Variables, their updates and timing, for the measurements.
#ifndef WRAPOPT_CC_GPU_CHECK_MEASURE_H_
#define WRAPOPT_CC_GPU_CHECK_MEASURE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/number.h"
#include "cc/gpu/check/device.h"
#include "cc/gpu/launcher.h"
#include "cc/rules/rules.h"

namespace wrapopt {
namespace gpu {

// Seconds of functions that enqueue work, by the GPU's clock: medians of
// alternating turns.
std::vector<double> Seconds(const std::vector<std::function<void()>>& works);

// ResNet-50's variables: for each convolution its kernel and the two variables
// of its batch normalization; and the last layer.
std::vector<uint64_t> ResNet50();

using Sizes = std::pair<std::string, std::vector<uint64_t>>;

// One variable of 1 GiB, or less if memory does not suffice for all arrays.
Sizes OneLarge(Number number);

// An update and its average, over arrays in one buffer.
class Work {
 public:
  Work(const std::string& sizes_name, const RuleInfo* rule, Number number,
       std::vector<uint64_t> sizes, uint64_t divisor)
      : arrays_(rule == nullptr ? 2 : CountNames(rule->states) + 2),
        name_((rule == nullptr ? "EMA" : std::string(rule->name) + ", EMA")) {
    name_.resize(16, ' ');
    name_ += " " + sizes_name;
    name_.resize(31, ' ');
    name_ += NameOf(number);
    name_.resize(40, ' ');
    const auto padded = [](uint64_t size) { return (size + 127) / 128 * 128; };
    uint64_t total = 0;
    for (uint64_t& size : sizes) {
      size = (size - 1) / divisor + 1;
      total += padded(size);
      elements_ += size;
    }
    const size_t bytes = SizeOf(number);
    buffer_ = std::make_unique<Array>(total * bytes * arrays_);
    Call("cuMemsetD8_v2", buffer_->address(), static_cast<unsigned char>(0x3c),
         total * bytes * arrays_);
    half_ = total * bytes * arrays_ / 2;
    moved_ = static_cast<double>(elements_) * bytes * (2 * arrays_ - 1);
    update_.is_double = number == Number::kDouble;
    update_.state = update_.input = number;
    update_.arrays = arrays_;
    update_.elements = sizes;
    if (rule == nullptr) {
      update_.sources = {{1, number}};
    } else {
      update_.rule = rule->id;
      update_.scalars = ScalarsOf(*rule);
    }
    update_.targets = {{0.1, number}};
    uint64_t begin = 0;
    for (const uint64_t size : sizes) {
      for (size_t a = 0; a < arrays_; ++a) {
        update_.addresses.push_back(buffer_->address() +
                                    (a * total + begin) * bytes);
      }
      begin += padded(size);
    }
  }

  void set_chunk_log2(int log2) { update_.chunk_log2 = log2; }
  void Enqueue() const { Run(update_); }

  // A copy from one half of the buffer to the other.
  void EnqueueCopy() const {
    Call("cuMemcpyDtoDAsync_v2", buffer_->address() + half_,
         buffer_->address(), half_, stream);
  }

  const std::string& name() const { return name_; }
  size_t variables() const { return update_.elements.size(); }
  size_t launches() const { return Graph(update_).launches(); }
  // Bytes: all arrays are read, and all but the gradient or the value are
  // written.
  double moved() const { return moved_; }
  double copied() const { return 2.0 * half_; }

 private:
  const size_t arrays_;
  std::string name_;
  uint64_t elements_ = 0;
  std::unique_ptr<Array> buffer_;
  uint64_t half_;
  double moved_;
  Update update_;
};

}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_CHECK_MEASURE_H_
