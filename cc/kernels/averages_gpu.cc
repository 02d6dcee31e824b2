#include "cc/kernels/averages_gpu.h"

namespace wrapopt {

void AddLazyRows(const std::vector<LazyAverage>& averages, int64_t begin,
                 int64_t end, std::vector<void*>* operands, LazyRows* lazy) {
  for (const LazyAverage& average : averages) {
    operands->push_back(average.Shadow(begin));
    operands->push_back(const_cast<char*>(average.Value(begin)));
    lazy->log_decays.push_back(average.log_decays + begin);
  }
  for (const LazyAverage& average : averages) {
    lazy->log_decays.push_back(average.log_decays + average.rows);
  }
  lazy->row_elements.push_back(
      end - begin == 1 ? 0 : averages.front().row_elements);
}

void AddMarks(const std::vector<LazyAverage>& averages,
              const std::vector<int64_t>& touched, gpu::RowMarks* marks) {
  for (const LazyAverage& average : averages) {
    marks->averages.push_back(
        {reinterpret_cast<gpu::Address>(average.log_decays),
         static_cast<uint64_t>(average.rows), average.log_decay,
         marks->touched.size()});
  }
  marks->touched.emplace_back(touched.begin(), touched.end());
}

}  // namespace wrapopt
