// The work of cc/kernels/averages.h on a GPU.
#ifndef WRAPOPT_CC_KERNELS_AVERAGES_GPU_H_
#define WRAPOPT_CC_KERNELS_AVERAGES_GPU_H_

#include <cstdint>
#include <vector>

#include "cc/gpu/launcher.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/gpu.h"

namespace wrapopt {

// Whether several rows that follow each other may be one variable of a pass.
inline bool AreAsOne(int64_t row_elements) {
  return row_elements <= static_cast<int64_t>(gpu::kMaxRowElements);
}

// Adds rows [begin, end) of a value as the next variable of a pass: the
// operands of its averages to `operands`, and their log decays to `lazy`.
void AddLazyRows(const std::vector<LazyAverage>& averages, int64_t begin,
                 int64_t end, std::vector<void*>* operands, LazyRows* lazy);

// All averages of a value have taken the step, in the rows `touched`.
void AddMarks(const std::vector<LazyAverage>& averages,
              const std::vector<int64_t>& touched, gpu::RowMarks* marks);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_AVERAGES_GPU_H_
