#include "cc/gpu/launcher.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "cc/gpu/loaded_kernels.h"
#include "cc/gpu/table.h"

namespace wrapopt {
namespace gpu {
namespace {

template <class AnyTable>
std::string Launch(Function function, unsigned grid_x, unsigned grid_y,
                   AnyTable* table, Stream stream) {
  void* arguments[] = {table};
  const Result result =
      GetDriver().LaunchKernel(function, grid_x, grid_y, 1, kThreads, 1, 1,
                               /*shared_bytes=*/0, stream, arguments, nullptr);
  return result == 0 ? "" : ErrorText("cuLaunchKernel", result);
}

Word ToWord(double x, bool is_double) {
  Word word = 0;
  if (is_double) {
    std::memcpy(&word, &x, sizeof(x));
  } else {
    const float y = static_cast<float>(x);
    std::memcpy(&word, &y, sizeof(y));
  }
  return word;
}

// The address range of an update's arrays of one kind.
class Range {
 public:
  explicit Range(size_t size) : size_(size) {}

  // Whether the offset of an array from the others fits into a table.
  bool Reaches(Address address) const {
    if (address == 0 || is_empty()) return true;
    const Address low = std::min(low_, address);
    return (std::max(high_, address) - low) / size_ < kNoArray &&
           (std::max(low_, address) - low) % size_ == 0;
  }

  void Add(Address address) {
    if (address == 0) return;
    low_ = std::min(low_, address);
    high_ = std::max(high_, address);
  }

  void Clear() { *this = Range(size_); }

  Address base() const { return is_empty() ? 0 : low_; }

  uint32_t Offset(Address address) const {
    return address == 0 ? kNoArray
                        : static_cast<uint32_t>((address - low_) / size_);
  }

  size_t size() const { return size_; }  // Bytes of an element.

 private:
  bool is_empty() const { return high_ < low_; }

  size_t size_;
  Address low_ = std::numeric_limits<Address>::max();
  Address high_ = 0;
};

int KernelOf(const Update& update) {
  return update.rule.has_value() ? static_cast<int>(*update.rule)
         : update.is_step        ? kAverage
                                 : kCatchUp;
}

// The launches of an update.
class Launches {
 public:
  Launches(const Update& update, LoadedKernels* loaded, Stream stream)
      : update_(update), loaded_(*loaded), stream_(stream) {
    uint64_t elements = 0;
    for (const uint64_t more : update.elements) {
      elements += more;
      left_ += more > 0;
    }
    chunk_log2_ = update.chunk_log2 > 0 ? update.chunk_log2
                                        : ChunkLog2(elements);
    Address next = update.numbers;
    const auto put = [&](double number) {
      prefix_.push_back(update.accept == 0
                            ? ToWord(number, update.is_double)
                            : std::exchange(next, next + sizeof(double)));
    };
    for (const double scalar : update.scalars) put(scalar);
    for (const auto* operands : {&update.sources, &update.targets}) {
      for (const Update::Operand& operand : *operands) {
        put(operand.scalar);
        prefix_.push_back(static_cast<Word>(operand.number));
      }
    }
    if (update.accept != 0) prefix_.push_back(update.accept);
    if (update.rule.has_value()) {
      const RuleInfo& info = Info(*update.rule);
      ranges_.resize(CountNames(info.states), Range(SizeOf(update.state)));
      ranges_.resize(ranges_.size() + CountNames(info.inputs),
                     Range(SizeOf(update.input)));
    }
    for (const auto* operands : {&update.sources, &update.targets}) {
      for (const Update::Operand& operand : *operands) {
        ranges_.emplace_back(SizeOf(operand.number));
      }
    }
    numbers_ = ranges_.size();
    if (is_lazy()) {
      ranges_.resize(numbers_ + 2 * update.targets.size(),
                     Range(sizeof(double)));
    }
  }

  std::string Run() {
    if (ranges_.size() != update_.arrays) {
      return "each variable must have " + std::to_string(ranges_.size()) +
             " arrays, got " + std::to_string(update_.arrays);
    }
    while (left_ > 0) {
      const Kind kind = ChooseKind();
      const std::string error = kind == Kind::kSmall ? RunOne<SmallTable>(kind)
                                                     : RunOne<LargeTable>(kind);
      if (!error.empty()) return error;
    }
    return "";
  }

 private:
  Kind ChooseKind() const {
    if (update_.accept != 0) return Kind::kProgram;
    // Launches with small tables cost less.
    const bool fits_small = left_ <= MostVariables<SmallTable>();
    return loaded_.Has(Kind::kLarge) &&
                   (!fits_small || !loaded_.Has(Kind::kSmall))
               ? Kind::kLarge
               : Kind::kSmall;
  }

  // A variable, or the part of it in a launch.
  struct Part {
    size_t variable;
    uint64_t begin, elements;
    uint32_t first_chunk;
  };

  // Large chunks, so that starting and ending a block costs little; but enough
  // chunks for several on each multiprocessor, and for a short tail.
  int ChunkLog2(uint64_t elements) const {
    int log2 = kMaxChunkLog2;
    while (log2 > kMinChunkLog2 &&
           elements >> log2 <
               32 * static_cast<uint64_t>(loaded_.device().multiprocessors)) {
      --log2;
    }
    return log2;
  }

  bool is_lazy() const { return !update_.row_elements.empty(); }

  // Whether each thread's share of an array is of one row.
  bool IsShared(uint64_t row) const {
    const size_t bytes = update_.is_double ? sizeof(double) : sizeof(float);
    return row * bytes % kShareBytes == 0;
  }

  uint64_t RowElements(size_t variable) const {
    return is_lazy() ? update_.row_elements[variable] : 0;
  }

  template <class AnyTable>
  size_t MostVariables() const {
    const size_t used = prefix_.size() + update_.arrays;
    if (used > AnyTable::kWords) return 0;
    return (AnyTable::kWords - used) * sizeof(Word) /
           ((1 + update_.arrays + is_lazy()) * sizeof(uint32_t));
  }

  // The address of a part's array; 0 for an input of zeros.
  Address Find(size_t variable, uint64_t begin, size_t array) const {
    const Address address =
        update_.addresses[variable * update_.arrays + array];
    if (address == 0) return 0;
    if (array >= numbers_ + update_.targets.size()) return address;
    if (array >= numbers_) {
      const uint64_t row = RowElements(variable);
      begin = row == 0 ? 0 : begin / row;
    }
    return address + begin * ranges_[array].size();
  }

  bool Reaches() const {
    for (size_t a = 0; a < ranges_.size(); ++a) {
      if (!ranges_[a].Reaches(Find(next_, begin_, a))) return false;
    }
    return true;
  }

  // Takes the parts of the next launch, and returns the number of their chunks.
  uint32_t Take(size_t most_variables) {
    parts_.clear();
    for (Range& range : ranges_) range.Clear();
    uint32_t chunks = 0;
    while (left_ > 0 && parts_.size() < most_variables && chunks < kMaxChunks) {
      const uint64_t elements = update_.elements[next_] - begin_;
      if (elements > 0) {
        if (!Reaches()) break;
        const uint64_t room = uint64_t{kMaxChunks - chunks} << chunk_log2_;
        uint64_t taken = std::min(elements, room);
        // A part begins with a row.
        const uint64_t row = RowElements(next_);
        if (row > 0 && taken < elements) taken -= taken % row;
        if (taken == 0) break;
        parts_.push_back({next_, begin_, taken, chunks});
        for (size_t a = 0; a < ranges_.size(); ++a) {
          ranges_[a].Add(Find(next_, begin_, a));
        }
        chunks += static_cast<uint32_t>(((taken - 1) >> chunk_log2_) + 1);
        if (taken < elements) {
          begin_ += taken;
          break;
        }
        --left_;
      }
      ++next_;
      begin_ = 0;
    }
    return chunks;
  }

  template <class AnyTable>
  std::string RunOne(Kind kind) {
    const size_t most_variables = MostVariables<AnyTable>();
    if (most_variables == 0) {
      return "each variable has " + std::to_string(update_.arrays) +
             " arrays, too many for a launch on " + loaded_.device().name;
    }
    const uint32_t chunks = Take(most_variables);
    // The kernel reads only the words that are set.
    AnyTable table;
    Word* to = std::copy(prefix_.begin(), prefix_.end(), table.words);
    for (const Range& range : ranges_) *to++ = range.base();
    char* entries = reinterpret_cast<char*>(to);
    const auto put = [&entries](uint32_t entry) {
      std::memcpy(entries, &entry, sizeof(entry));
      entries += sizeof(entry);
    };
    for (const Part& part : parts_) {
      const uint64_t before = (part.elements - 1) >> chunk_log2_ << chunk_log2_;
      const uint64_t row = RowElements(part.variable);
      bool is_aligned = !is_lazy() || (!update_.is_step && IsShared(row));
      for (size_t a = 0; a < numbers_; ++a) {
        is_aligned &= Find(part.variable, part.begin, a) % 16 == 0;
      }
      put(Place(part.first_chunk, static_cast<uint32_t>(part.elements - before),
                is_aligned));
      for (size_t a = 0; a < ranges_.size(); ++a) {
        put(ranges_[a].Offset(Find(part.variable, part.begin, a)));
      }
      if (is_lazy()) put(static_cast<uint32_t>(row));
    }
    bool is_dense = is_lazy();
    for (const Range& range : ranges_) is_dense |= range.size() == 2;
    table.header = {static_cast<uint32_t>(parts_.size()),
                    chunks,
                    static_cast<uint16_t>(update_.sources.size()),
                    static_cast<uint16_t>(update_.targets.size()),
                    static_cast<uint8_t>(chunk_log2_),
                    static_cast<uint8_t>(update_.state),
                    static_cast<uint8_t>(update_.input),
                    is_dense,
                    is_lazy()};
    Function function;
    const std::string error =
        loaded_.Find(KernelOf(update_), update_.is_double, kind, &function);
    if (!error.empty()) return error;
    return Launch(function, chunks, 1, &table, stream_);
  }

  const Update& update_;
  LoadedKernels& loaded_;
  const Stream stream_;
  int chunk_log2_;
  std::vector<Word> prefix_;   // The words that all tables share.
  std::vector<Range> ranges_;  // Of the launch's arrays.
  size_t numbers_;             // Those of them that are not log decays.
  std::vector<Part> parts_;    // Of the launch.
  size_t next_ = 0;            // Variable,
  uint64_t begin_ = 0;         // of which so many elements are done.
  size_t left_ = 0;            // Variables with elements that are not done.
};

template <class AnyTable>
std::string RunMarks(const RowMarks& marks, LoadedKernels* loaded,
                     Kind kind, Stream stream) {
  Function function;
  const std::string error =
      loaded->Find(kMark, /*is_double=*/true, kind, &function);
  if (!error.empty()) return error;
  AnyTable table;
  std::vector<Word> rows;
  unsigned targets = 0;
  auto launch = [&]() -> std::string {
    table.header = {targets};
    std::copy(rows.begin(), rows.end(), table.words + kWordsPerMark * targets);
    const std::string launched = Launch(function, targets, 1, &table, stream);
    rows.clear();
    targets = 0;
    return launched;
  };
  for (const RowMarks::Average& average : marks.averages) {
    const std::vector<uint64_t>& touched = marks.touched[average.touched];
    size_t done = 0;
    for (bool is_last = false; !is_last;) {
      // Rows that do not fit go on in the next launch.
      const size_t used = kWordsPerMark * (targets + 1) + rows.size();
      if (used + 1 > AnyTable::kWords) {
        const std::string launched = launch();
        if (!launched.empty()) return launched;
        continue;
      }
      const size_t begin = rows.size();
      const size_t count =
          std::min(touched.size() - done, AnyTable::kWords - used);
      rows.insert(rows.end(), touched.begin() + done,
                  touched.begin() + done + count);
      done += count;
      is_last = done == touched.size();
      const Word words[] = {
          average.log_decays, average.rows,
          ToWord(average.log_decay, /*is_double=*/true),
          Marked(begin, rows.size(), is_last)};
      std::copy_n(words, kWordsPerMark,
                  table.words + kWordsPerMark * targets++);
    }
  }
  return targets == 0 ? "" : launch();
}

template <class AnyTable>
std::string RunSum(const RowSum& sum, LoadedKernels* loaded, Kind kind,
                   Stream stream) {
  Function function;
  const std::string error = loaded->Find(kSum, sum.is_double, kind, &function);
  if (!error.empty()) return error;
  const unsigned grid_y = static_cast<unsigned>(
      std::min<uint64_t>((sum.elements - 1) / kThreads + 1, 64));
  AnyTable table;
  std::vector<Word> grads;
  uint32_t runs = 0;
  auto launch = [&]() -> std::string {
    table.header = {runs, static_cast<uint32_t>(sum.number), sum.grads,
                    sum.sums, sum.elements};
    std::copy(grads.begin(), grads.end(), table.words + 2 * runs);
    const std::string launched =
        Launch(function, runs, grid_y, &table, stream);
    grads.clear();
    runs = 0;
    return launched;
  };
  for (const RowSum::Run& run : sum.runs) {
    // A run that does not fit continues in the next launch.
    for (size_t done = 0; done < run.grads.size();) {
      const size_t used = 2 * runs + grads.size();
      if (used + 3 > AnyTable::kWords) {
        const std::string launched = launch();
        if (!launched.empty()) return launched;
        continue;
      }
      const size_t count =
          std::min(run.grads.size() - done, AnyTable::kWords - used - 2);
      grads.insert(grads.end(), run.grads.begin() + done,
                   run.grads.begin() + done + count);
      done += count;
      table.words[2 * runs] = run.row;
      table.words[2 * runs + 1] = grads.size();
      ++runs;
    }
  }
  return runs == 0 ? "" : launch();
}

}  // namespace

std::string Enqueue(const Update& update, Stream stream) {
  LoadedKernels* loaded;
  const std::string error = LoadedKernels::Current(&loaded);
  if (!error.empty()) return error;
  return Launches(update, loaded, stream).Run();
}

std::string LoadForProgram(const Update& update) {
  LoadedKernels* loaded;
  const std::string error = LoadedKernels::Current(&loaded);
  if (!error.empty()) return error;
  Function function;
  return loaded->Find(KernelOf(update), update.is_double, Kind::kProgram,
                      &function);
}

std::string Enqueue(const RowSum& sum, Stream stream) {
  if (sum.elements == 0) return "";
  LoadedKernels* loaded;
  const std::string error = LoadedKernels::Current(&loaded);
  if (!error.empty()) return error;
  return loaded->Has(Kind::kLarge)
             ? RunSum<LargeSumTable>(sum, loaded, Kind::kLarge, stream)
             : RunSum<SmallSumTable>(sum, loaded, Kind::kSmall, stream);
}

std::string Enqueue(const RowMarks& marks, Stream stream) {
  LoadedKernels* loaded;
  const std::string error = LoadedKernels::Current(&loaded);
  if (!error.empty()) return error;
  return loaded->Has(Kind::kLarge)
             ? RunMarks<LargeMarkTable>(marks, loaded, Kind::kLarge, stream)
             : RunMarks<SmallMarkTable>(marks, loaded, Kind::kSmall, stream);
}

}  // namespace gpu
}  // namespace wrapopt
