#include "cc/xla/elementwise.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cc/rules/catch_up.h"
#include "xla/hlo/builder/lib/arithmetic.h"
#include "xla/hlo/builder/lib/comparators.h"
#include "xla/hlo/builder/lib/constants.h"
#include "xla/shape.h"
#include "xla/shape_util.h"

namespace wrapopt {
namespace {

using xla::XlaBuilder;
using xla::XlaOp;

// A rule's number type: the operation that computes the number.
struct Term {
  XlaOp op;
};

Term operator+(const Term& a, const Term& b) { return {a.op + b.op}; }
Term operator-(const Term& a, const Term& b) { return {a.op - b.op}; }
Term operator*(const Term& a, const Term& b) { return {a.op * b.op}; }
Term operator/(const Term& a, const Term& b) { return {a.op / b.op}; }

// The functions of cc/rules/maths.h.

Term ScalarLike(const Term& like, double x) {
  return {xla::ScalarLike(like.op, x)};
}
Term Sqrt(const Term& x) { return {xla::Sqrt(x.op)}; }
Term Eq(const Term& a, const Term& b) { return {xla::Eq(a.op, b.op)}; }
Term Gt(const Term& a, const Term& b) { return {xla::Gt(a.op, b.op)}; }
Term Select(const Term& which, const Term& yes, const Term& no) {
  return {xla::Select(which.op, yes.op, no.op)};
}
// Not XLA's, whose result is NaN if either operand is.
Term Max(const Term& a, const Term& b) { return Select(Gt(a, b), a, b); }
Term OneMinusExp(const Term& x) { return {-xla::Expm1(x.op)}; }

// The parts of log decays, which have the layout of LazyAverage.
Term OfRows(XlaOp log_decays, int64_t rows) {
  return {xla::SliceInDim(log_decays, 0, rows, 1, 0)};
}
Term OfAllSteps(XlaOp log_decays, int64_t rows) {
  return {
      xla::Reshape(xla::SliceInDim(log_decays, rows, rows + 1, 1, 0), {})};
}

// The log decays of an average with so many rows, with small sums. A loop that
// runs at most once, and changes them in place: a conditional copies them.
XlaOp RebasedLogDecays(XlaOp log_decays, int64_t rows) {
  XlaBuilder* const builder = log_decays.builder();
  const xla::Shape shape = builder->GetShape(log_decays).value();
  auto part = [&](const char* name, auto result) {
    const std::unique_ptr<XlaBuilder> inside = builder->CreateSubBuilder(name);
    result(xla::Parameter(inside.get(), 0, shape, "log_decays"));
    return inside->BuildAndNoteError();
  };
  const xla::XlaComputation must = part("MustRebase", [&](XlaOp sums) {
    return CatchUp::MustRebase(OfAllSteps(sums, rows));
  });
  const xla::XlaComputation rebased = part("Rebased", [&](XlaOp sums) {
    xla::ConcatInDim(
        sums.builder(),
        {CatchUp::Rebased(OfAllSteps(sums, rows), OfRows(sums, rows)).op,
         xla::ConstantR1<double>(sums.builder(), {CatchUp::kRebased}),
         xla::SliceInDim(sums, rows + 1, rows + 2, 1, 0)},
        0);
  });
  return xla::While(must, rebased, log_decays);
}

template <class R, size_t... s, size_t... i, size_t... c>
void StepOf(absl::Span<XlaOp> states, absl::Span<const XlaOp> inputs,
            absl::Span<const XlaOp> scalars, std::index_sequence<s...>,
            std::index_sequence<i...>, std::index_sequence<c...>) {
  Term x[] = {{states[s]}...};
  R::Step(x[s]..., Term{inputs[i]}..., Term{scalars[c]}...);
  ((states[s] = x[s].op), ...);
}

// Adds no operation if the type is already right: a step has several arrays, a
// program hundreds of steps.
XlaOp Convert(XlaOp x, xla::PrimitiveType type) {
  const xla::PrimitiveType from = x.builder()->GetShape(x)->element_type();
  return from == type ? x : xla::ConvertElementType(x, type);
}

// A scatter's computation that replaces the old value.
xla::XlaComputation Replace(xla::PrimitiveType type, XlaBuilder* builder) {
  const auto replace = builder->CreateSubBuilder("Replace");
  const xla::Shape scalar = xla::ShapeUtil::MakeShape(type, {});
  xla::Parameter(replace.get(), 0, scalar, "before");
  xla::Parameter(replace.get(), 1, scalar, "update");
  return replace->Build().value();
}

}  // namespace

xla::PrimitiveType ComputeType(xla::PrimitiveType storage) {
  return storage == xla::F16 || storage == xla::BF16 ? xla::F32 : storage;
}

XlaOp Stored(XlaOp array, xla::PrimitiveType storage) {
  return ComputeType(storage) == storage ? array
                                         : xla::OptimizationBarrier(array);
}

void Step(RuleId rule, xla::PrimitiveType storage,
          absl::Span<XlaOp> states, absl::Span<const XlaOp> inputs,
          absl::Span<const XlaOp> scalars) {
  const xla::PrimitiveType compute = ComputeType(storage);
  std::vector<XlaOp> converted;
  for (XlaOp& state : states) state = Convert(state, compute);
  for (const XlaOp& input : inputs) {
    converted.push_back(Convert(input, compute));
  }
  switch (rule) {
#define WRAPOPT_STEP(name, s, i, c, sparse)                             \
  case RuleId::k##name:                                                 \
    StepOf<name>(states, converted, scalars,                            \
                 std::make_index_sequence<CountNames(s)>(),             \
                 std::make_index_sequence<CountNames(i)>(),             \
                 std::make_index_sequence<CountNames(c)>());            \
    break;
    WRAPOPT_RULES(WRAPOPT_STEP)
#undef WRAPOPT_STEP
  }
  for (XlaOp& state : states) state = Convert(state, storage);
}

Rows::Rows(xla::PrimitiveType storage, absl::Span<const int64_t> dimensions,
           XlaOp grad, XlaOp indices)
    : Rows(storage, dimensions, indices) {
  grad_ = xla::ConvertElementType(grad, ComputeType(storage_));
  if (grad.builder()->GetShape(grad).value().is_dynamic_dimension(0)) {
    grad_ = xla::RemoveDynamicDimension(grad_, 0);
  }
}

Rows::Rows(xla::PrimitiveType storage, absl::Span<const int64_t> dimensions,
           XlaOp indices)
    : storage_(storage), dimensions_(dimensions.begin(), dimensions.end()) {
  XlaBuilder* builder = indices.builder();
  const xla::Shape shape = builder->GetShape(indices).value();
  const int64_t end = dimensions_[0];
  count_ = shape.dimensions(0);
  index_type_ =
      std::max(count_, end) <= std::numeric_limits<int32_t>::max() ? xla::S32
                                                                   : xla::S64;
  // Compared in 64 bits, before a conversion to a narrower type.
  const XlaOp wide = xla::ConvertElementType(indices, xla::S64);
  counts_ = xla::And(xla::Ge(wide, xla::ScalarLike(wide, 0)),
                     xla::Lt(wide, xla::ScalarLike(wide, end)));
  index_ = xla::ConvertElementType(indices, index_type_);
  if (shape.is_dynamic_dimension(0)) {
    const XlaOp size = xla::ConvertElementType(
        xla::GetDimensionSize(indices, 0), index_type_);
    counts_ = xla::And(xla::RemoveDynamicDimension(counts_, 0),
                       xla::Lt(xla::Iota(builder, index_type_, count_), size));
    index_ = xla::RemoveDynamicDimension(index_, 0);
  }
  index_ = xla::Select(counts_, index_, xla::ScalarLike(index_, end));
}

void Rows::Keep(XlaOp accept) {
  accept_ = accept;
  counts_ = xla::And(counts_, accept);
  index_ = xla::Select(accept, index_, xla::ScalarLike(index_, dimensions_[0]));
}

XlaOp Rows::Dense() const {
  const xla::PrimitiveType type = ComputeType(storage_);
  return Scatter(Zeros(dimensions_[0]), index_, grad_,
                 xla::CreateScalarAddComputation(type, grad_.builder()));
}

Rows::Sums Rows::Sum() const {
  if (count_ == 0) return {grad_, index_, index_};
  XlaBuilder* const builder = grad_.builder();
  const xla::PrimitiveType type = ComputeType(storage_);
  // Sorted, so that gradients of one row are neighbours, in their order.
  const XlaOp number = xla::Iota(builder, index_type_, count_);
  const XlaOp sorted = xla::Sort(
      {index_, number},
      xla::CreateScalarLtComputation({index_type_, index_type_}, builder),
      /*dimension=*/0, /*is_stable=*/true);
  const XlaOp index = xla::GetTupleElement(sorted, 0);
  const XlaOp position = xla::GetTupleElement(sorted, 1);
  const XlaOp none = xla::ScalarLike(index, -1);
  const XlaOp before = xla::PadInDim(
      xla::SliceInDim(index, 0, count_ - 1, 1, 0), none, 0, 1, 0);
  const XlaOp is_first = xla::Ne(index, before);
  // The place of the first gradient of the same row: a cumulative maximum.
  const XlaOp first = xla::ReduceWindowWithGeneralPadding(
      xla::Select(is_first, number, xla::ZerosLike(number)), none,
      xla::CreateScalarMaxComputation(index_type_, builder), {count_}, {1}, {},
      {}, {{count_ - 1, 0}});
  const XlaOp place = Scatter(xla::ZerosLike(number), position, first,
                              Replace(index_type_, builder), /*unique=*/true);
  const XlaOp sums = Scatter(Zeros(count_), place, grad_,
                             xla::CreateScalarAddComputation(type, builder));
  return {sums,
          xla::Select(is_first, index,
                      xla::ScalarLike(index, dimensions_[0])),
          position};
}

void Rows::Step(RuleId rule, absl::Span<XlaOp> states,
                absl::Span<const XlaOp> scalars, XlaOp old) const {
  const Sums sums = Sum();
  std::vector<XlaOp> rows = {count_ == 0 ? old : Gather(old, sums.position)};
  for (const XlaOp& state : states.subspan(1)) {
    rows.push_back(Gather(state, sums.index));
  }
  wrapopt::Step(rule, storage_, absl::MakeSpan(rows), {sums.grad}, scalars);
  for (size_t s = 0; s < states.size(); ++s) {
    const xla::PrimitiveType type =
        states[s].builder()->GetShape(states[s])->element_type();
    states[s] = Scatter(states[s], sums.index, rows[s],
                        Replace(type, states[s].builder()), /*unique=*/true);
  }
}

XlaOp Rows::Put(XlaOp array, XlaOp rows) const {
  return Scatter(array, index_, rows,
                 Replace(array.builder()->GetShape(array)->element_type(),
                         array.builder()));
}

XlaOp Rows::Old(XlaOp array) const { return Kept(Get(array)); }

XlaOp Rows::OldLogs(XlaOp log_decays) const {
  return Kept(xla::ConcatInDim(
      log_decays.builder(),
      {Get(log_decays), xla::SliceInDim(log_decays, dimensions_[0],
                                        dimensions_[0] + 1, 1, 0)},
      0));
}

XlaOp Rows::Kept(XlaOp array) const {
  XlaBuilder* const builder = array.builder();
  const xla::Shape shape = builder->GetShape(array).value();
  // XLA fuses a scatter into no other op. Ones, because it would share an array
  // of zeros with other scatters, and then copy it.
  return Scatter(xla::FullLike(array, 1),
                 xla::Iota(builder, index_type_, shape.dimensions(0)), array,
                 Replace(shape.element_type(), builder), /*unique=*/true);
}

XlaOp Rows::CaughtUp(XlaOp shadow, xla::PrimitiveType shadow_storage,
                     XlaOp old, XlaOp old_logs) const {
  // Rows that do not count read the last element, and need no catch-up.
  return wrapopt::CaughtUp(Get(shadow), shadow_storage, old, old_logs);
}

XlaOp Rows::Marked(XlaOp log_decays, XlaOp old_logs, XlaOp log_decay) const {
  XlaBuilder* builder = log_decays.builder();
  const int64_t end = dimensions_[0];
  const XlaOp all_steps =
      xla::SliceInDim(old_logs, count_, count_ + 1, 1, 0) + log_decay;
  XlaOp last = xla::ConstantR0WithType(builder, index_type_, end);
  const XlaOp none = xla::ScalarLike(last, end + 2);
  if (accept_) last = xla::Select(*accept_, last, none);
  const XlaOp index = xla::ConcatInDim(
      builder,
      {xla::Select(counts_, index_, xla::Broadcast(none, {count_})),
       xla::Reshape(last, {1})},
      0);
  const XlaOp marked =
      Scatter(log_decays, index,
              xla::Broadcast(xla::Reshape(all_steps, {}), {count_ + 1}),
              Replace(xla::F64, builder));
  // The address of the value's buffer is not known.
  return RebasedLogDecays(
      xla::DynamicUpdateSlice(
          marked, xla::ConstantR1<double>(builder, {0}),
          {xla::ConstantR0WithType(builder, xla::S32, end + 1)}),
      end);
}

XlaOp Rows::Scatter(XlaOp array, XlaOp index, XlaOp updates,
                    const xla::XlaComputation& combine, bool unique) const {
  const int rank = array.builder()->GetShape(array)->dimensions_size();
  xla::ScatterDimensionNumbers numbers;
  numbers.set_index_vector_dim(1);
  numbers.add_inserted_window_dims(0);
  numbers.add_scatter_dims_to_operand_dims(0);
  for (int d = 1; d < rank; ++d) numbers.add_update_window_dims(d);
  return xla::Scatter(array, index, updates, combine, numbers,
                      /*indices_are_sorted=*/false, unique);
}

XlaOp Rows::Gather(XlaOp array, XlaOp index) const {
  const xla::Shape shape = array.builder()->GetShape(array).value();
  xla::GatherDimensionNumbers numbers;
  numbers.set_index_vector_dim(1);
  numbers.add_collapsed_slice_dims(0);
  numbers.add_start_index_map(0);
  std::vector<int64_t> sizes(shape.dimensions().begin(),
                             shape.dimensions().end());
  sizes[0] = 1;
  for (size_t d = 1; d < sizes.size(); ++d) numbers.add_offset_dims(d);
  return xla::Gather(array, index, numbers, sizes);
}

XlaOp CaughtUp(XlaOp shadow, xla::PrimitiveType shadow_storage, XlaOp value,
               XlaOp log_decays) {
  const xla::Shape shape = shadow.builder()->GetShape(shadow).value();
  const int64_t rows = shape.dimensions(0);
  const Term lags =
      CatchUp::Lag(OfAllSteps(log_decays, rows), OfRows(log_decays, rows));
  const XlaOp rates = xla::BroadcastInDim(
      xla::ConvertElementType(CatchUp::Rate(lags).op,
                              ComputeType(shadow_storage)),
      shape.dimensions(), {0});
  Step(RuleId::kEma, shadow_storage, absl::MakeSpan(&shadow, 1), {value},
       {rates});
  return shadow;
}

XlaOp Rows::Zeros(int64_t rows) const {
  std::vector<int64_t> dimensions = dimensions_;
  dimensions[0] = rows;
  return xla::Broadcast(xla::Zero(grad_.builder(), ComputeType(storage_)),
                        dimensions);
}

}  // namespace wrapopt
