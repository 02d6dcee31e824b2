#include "cc/ops/averaging_rounds.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/ops/inferred_inputs.h"
#include "cc/ops/number_types.h"
#include "cc/ops/registration.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace wrapopt {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status CheckTimeout(double timeout_secs) {
  if (timeout_secs > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "timeout_secs must be greater than 0, infinity for no deadline, got ",
      timeout_secs));
}

absl::Status CheckPlace(const PartialTensorShape& shape) {
  if (shape.IsCompatibleWith(PartialTensorShape({2}))) return absl::OkStatus();
  return Misshapen("place", shape, "[2]", "a round and its generation");
}

absl::Status CheckKnown(const PartialTensorShape& shape) {
  if (shape.IsCompatibleWith(PartialTensorShape({-1}))) return absl::OkStatus();
  return Misshapen("known", shape, "[1 + M]",
                   "numbers, and the names of M workers");
}

absl::Status CheckVectors(const tensorflow::DataTypeVector& dtypes,
                          const std::vector<int64_t>& sizes) {
  if (dtypes.size() != sizes.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sizes must have ", dtypes.size(), " numbers, as dtypes has, got ",
        sizes.size()));
  }
  for (const int64_t size : sizes) {
    if (size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("sizes must be at least 0, got ", size));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTravels(const std::string& travels,
                          const tensorflow::DataTypeVector& dtypes,
                          bool holds_center) {
  if (travels.empty()) return absl::OkStatus();
  if (!holds_center) {
    return absl::InvalidArgumentError(absl::StrCat(
        "travels must be '' if the center is in variables, got '", travels,
        "'"));
  }
  for (const tensorflow::DataType dtype : dtypes) {
    if (dtype != tensorflow::DT_FLOAT) {
      return absl::InvalidArgumentError(
          absl::StrCat("dtypes must be float if codes of ", travels,
                       " travel, got ", DataTypeString(dtype)));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGroups(const std::vector<int64_t>& sizes, int64_t count) {
  int64_t left = count;
  for (const int64_t size : sizes) {
    if (size < 0 || std::max<int64_t>(size, 1) > left) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sizes must be at least 0, and ", count,
          " together at most, the number of variables, got ", size,
          " with ", left, " left"));
    }
    left -= std::max<int64_t>(size, 1);
  }
  return absl::OkStatus();
}

namespace {

// Checks inputs in their order.
absl::Status CheckInputs(const std::vector<std::string>& specs,
                         InferenceContext* c) {
  InferredInputs inputs(c);
  for (const absl::string_view spec : specs) {
    const std::string name(spec.substr(0, spec.find(':')));
    if (name == "values") continue;  // A list, of the kernel.
    PartialTensorShape shape;
    TF_RETURN_IF_ERROR(inputs.FindTensor(name.c_str(), &shape));
    TF_RETURN_IF_ERROR(name == "place"   ? CheckPlace(shape)
                       : name == "known" ? CheckKnown(shape)
                                         : CheckScalar(name, shape));
    const tensorflow::Tensor* const value = inputs.Constant();
    if (name == "timeout_secs" && value != nullptr) {
      TF_RETURN_IF_ERROR(CheckTimeout(value->scalar<double>()()));
    }
  }
  return absl::OkStatus();
}

absl::Status RoundsShape(InferenceContext* c) {
  tensorflow::DataTypeVector dtypes;
  std::vector<int64_t> sizes;
  TF_RETURN_IF_ERROR(c->GetAttr("dtypes", &dtypes));
  TF_RETURN_IF_ERROR(c->GetAttr("sizes", &sizes));
  TF_RETURN_IF_ERROR(CheckVectors(dtypes, sizes));
  std::string travels;
  bool holds_center;
  TF_RETURN_IF_ERROR(c->GetAttr("travels", &travels));
  TF_RETURN_IF_ERROR(c->GetAttr("holds_center", &holds_center));
  c->set_output(0, c->Scalar());
  return CheckTravels(travels, dtypes, holds_center);
}

}  // namespace

bool RegisterRoundsOp(const char* name, const std::vector<std::string>& inputs,
                      const std::vector<RoundsOutput>& outputs, const char* doc,
                      const std::vector<std::string>& attrs) {
  tensorflow::OpDefBuilder op(name);
  for (const std::string& spec : inputs) op.Input(spec);
  for (const RoundsOutput& output : outputs) op.Output(output.spec);
  for (const std::string& spec : attrs) op.Attr(spec);
  op.SetIsStateful();
  op.SetShapeFn([=](InferenceContext* c) -> absl::Status {
    for (size_t i = 0; i < outputs.size(); ++i) {
      tensorflow::shape_inference::ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(
          PartialTensorShape(outputs[i].shape), &shape));
      c->set_output(i, shape);
    }
    return CheckInputs(inputs, c);
  });
  op.Doc(doc);
  return Register(op);
}

REGISTER_OP("Wrapopt>AveragingRounds")
    .Output("rounds: resource")
    .Attr("num_workers: int >= 1")
    .Attr("dtypes: list({float, double}) >= 0 = []")
    .Attr("sizes: list(int) >= 0 = []")
    .Attr("holds_center: bool = true")
    .Attr("travels: {'', 'bfloat16', 'int8', 'int4'} = ''")
    .Attr("settings: string = ''")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(RoundsShape)
    .Doc(R"doc(
The averaging rounds of a group of workers, on one server.

Each worker trains a copy of the center for a while. In a round, the workers
send their values, and the center becomes their mean or takes a step towards it.
Rounds are numbered, and one is open. No worker is special: each of them may end
a round, and whoever stops costs the others one deadline.

A center may be divided between servers, each with rounds of its own. The rounds
of one server lead. In a round, a worker runs, each after the other:

  Wrapopt>AveragingEnter at the lead,
  Wrapopt>AveragingStage at all servers, for all values,
  Wrapopt>AveragingArrive at the lead,
  Wrapopt>AveragingFollow at the others, which free memory early,
  Wrapopt>AveragingClose at the lead,
  Wrapopt>AveragingOuterStep or Wrapopt>AveragingMean at the others, then at the
    lead,

and takes the center: with Wrapopt>AveragingCenter and Wrapopt>AveragingRelease
if the rounds hold it. An op whose part is over has no effect, so each worker
may run all of them. A place is a round and a generation: before a first round,
and if a server has lost its center, Wrapopt>AveragingRestore begins a
generation. A worker that is done runs Wrapopt>AveragingLeave at the lead.

The memory of a server does not grow with the number of workers, except by
names. It holds the mean of the members' values, and the values of those that
have a turn. The mean is a running mean

    mean_k = mean_{k-1} + w_k / (w_1 + ... + w_k) (value_k - mean_{k-1})

in the order in which they come, in float (in double for double). So the mean of
equal values is exact, and that of large half values does not overflow.

The lead answers with a vector of strings, `known`. The first string holds
numbers (the round, its generation, whether it is closed, the worker's turn, the
newest turn, and the turns that are alive). The others name the members; while
the round is open, some of the newest ones. Those without values are named once
more at the end.

rounds: A handle. It must not leave the server.
num_workers: The number of workers.
dtypes: For each vector of the center, its dtype.
sizes: The same, the number of elements.
holds_center: Whether the rounds hold the center. If not, it is in variables.
travels: What workers send, and take if they hold the center of the round
  before: "" for the numbers themselves, or the dtype of codes, see
  cc/engine/codes.h. Then a worker sends codes of its values minus the center,
  and Wrapopt>AveragingOuterStep encodes how far the center goes. The center is
  the sum of all decoded updates, in all workers and on the server. The rounds
  keep the error of the last update, and add it to the next one.
settings: Tells how the center is used. This and the attributes above must be
  the same in all ops that share the rounds. If it has several lines, an error
  names the first one that differs, in both. In a line, what follows a tab is
  told and not compared.
container: If non-empty, the container that holds the rounds.
shared_name: Ops with the same name on the same device share the rounds, in all
  graphs, sessions and processes. If empty, the rounds are not shared.
)doc");

const bool join_defined = RegisterRoundsOp(
    "Wrapopt>AveragingJoin",
    {"rounds: resource", "worker: string", "process: int64", "resumes: bool"},
    {{"workers: int64"}}, R"doc(
Makes a worker known by its name, at the server that leads.

Rounds know the workers that have joined or entered. The op fails if another
process has had the worker's name, or num_workers others are known.

rounds: From Wrapopt>AveragingRounds.
worker: The worker's name.
process: A number that no other process has.
resumes: Whether the worker resumes. Then it takes its name from another
  process, or the place of a worker that has left.
workers: The number of workers that are known now and have not left.
)doc");

const bool enter_defined = RegisterRoundsOp(
    "Wrapopt>AveragingEnter",
    {"rounds: resource", "worker: string", "process: int64", "place: int64",
     "most_turns: int64", "turn_secs: double", "timeout_secs: double"},
    {{"turn: int64"}, {"known: string", {-1}}}, R"doc(
Waits for a turn to send values to the open round, at the server that leads.

If a worker enters again, its wait or its turn is over.

rounds: From Wrapopt>AveragingRounds.
worker: The worker's name.
process: A number that no other process has. The op fails if another process
  has taken the worker's name, or the worker has left, or is new and num_workers
  others are known.
place: [2] the round and the generation of the center from which the worker's
  values started; to restore a center, those that are open.
most_turns: How many workers may have a turn. 0: the turn is to restore a
  center, and begins when no worker has one.
turn_secs: After that time, the turn ends and its values are dropped.
timeout_secs: After that time without a turn, the op fails.
stopped_secs: The time that it then waits on, if the rounds are stopped.
turn: Its number, or -1 if the values are not wanted: another round is open, it
  is closed, the worker's values are part of it, or it has entered again.
known: [1 + M] what the lead knows, with this turn and place.
)doc",
    {"stopped_secs: float = 0.0"});

const bool stage_defined = RegisterRoundsOp(
    "Wrapopt>AveragingStage",
    {"rounds: resource", "worker: string", "known: string", "weight: double",
     "count: int64", "first: int64", "values: T"},
    {{"accepted: bool"}}, R"doc(
Sends some of a worker's values to a server.

They are no part of the round until the worker arrives. The server also follows
what is known, as in Wrapopt>AveragingFollow.

A worker that has no values, because they are not finite, sends none, with
weight 0. The round does not wait for it, and its mean is that of the others. If
no member has values, Wrapopt>AveragingOuterStep changes no center.

rounds: From Wrapopt>AveragingRounds.
worker: The worker's name.
known: [1 + M] from Wrapopt>AveragingEnter. With the numbers of a later
  generation, the values are a center for Wrapopt>AveragingRestore.
weight: The weight of the values in the mean, at least 0.
count: The number of all vectors: that of the center's, 0 with weight 0; in a
  center to restore, of its velocities, too. If codes travel, the errors of all
  vectors come before velocities.
first: The index of the first vector.
values: Vectors, of the dtypes and sizes of the center's; but for a center to
  restore, half and bfloat16 for float. Several consecutive ones may be one
  value, one after the other. If codes travel, they are codes of vectors; but
  not those of a center to restore. A value whose buffer has no other owner is
  not copied.
accepted: False if another round is open, it is closed, the turn is over, or the
  worker's values are part of the round.
)doc",
    {"T: list({" WRAPOPT_NUMBER_NAMES "uint8}) >= 0"});

const bool arrive_defined = RegisterRoundsOp(
    "Wrapopt>AveragingArrive",
    {"rounds: resource", "worker: string", "known: string"},
    {{"accepted: bool"}, {"known_now: string", {-1}}}, R"doc(
Makes a worker a member of the open round, at the server that leads.

All of its values must be on all servers. The server adds them to its mean, and
the turn ends.

rounds: From Wrapopt>AveragingRounds.
worker: The worker's name.
known: [1 + M] from Wrapopt>AveragingEnter.
accepted: False if another round is open, it is closed, or the turn is over.
known_now: [1 + M] what the lead knows now.
)doc");

const bool release_defined = RegisterRoundsOp(
    "Wrapopt>AveragingRelease",
    {"rounds: resource", "worker: string", "turn: int64"},
    {{"was_alive: bool"}}, R"doc(
Lets other workers read or send values, in place of one that has ended.

A worker calls it when it has read all that it needs from a server, and at the
server that leads when it gives up its turn.

rounds: From Wrapopt>AveragingRounds.
worker: The worker's name.
turn: A scalar, the turn from Wrapopt>AveragingEnter, or -1.
was_alive: False if the turn was over.
)doc");

const bool follow_defined = RegisterRoundsOp(
    "Wrapopt>AveragingFollow",
    {"rounds: resource", "known: string"},
    {{"accepted: bool"}}, R"doc(
Tells a server that does not lead what the lead knows.

The server adds the values of members to its mean, and drops those of turns that
are over.

rounds: From Wrapopt>AveragingRounds.
known: [1 + M] from another of these ops at the server that leads.
accepted: False if another round is open.
)doc");

const bool close_defined = RegisterRoundsOp(
    "Wrapopt>AveragingClose",
    {"rounds: resource", "place: int64", "min_workers: int64",
     "timeout_secs: double", "grace_secs: double"},
    {{"known: string", {-1}}}, R"doc(
Waits until a round is closed, at the server that leads.

A round is closed once all workers are members. It is also closed once the
expected workers are, at least min_workers; grace_secs after min_workers are;
and after timeout_secs, if min_workers are. Otherwise, the op then fails. A
worker that has left counts as a member here, but one member at least must have
come.

At first all num_workers workers are expected. After a round that a deadline has
closed, the expected workers are those of that round and all that have started,
read the center or entered since, even if too late. So the rounds wait for a
dead worker once, and again after it has returned. After a round of all
num_workers, and in a new generation, all are expected again.

rounds: From Wrapopt>AveragingRounds.
place: [2] the open round and its generation.
min_workers: A scalar in [1, num_workers].
timeout_secs: A scalar greater than 0; infinity for no deadline.
grace_secs: A scalar of at least 0, the same.
stopped_secs: The time that it waits on after timeout_secs, if the rounds are
  stopped.
known: [1 + M] the members, sorted, also of the last round that has ended; none
  of other rounds.
)doc",
    {"stopped_secs: float = 0.0"});

const bool restore_defined = RegisterRoundsOp(
    "Wrapopt>AveragingRestore",
    {"rounds: resource", "worker: string", "from_generation: int64",
     "place: int64", "job: int64"},
    {{"restored: bool"}}, R"doc(
Begins a new generation of a server's rounds, with the center of a worker.

The worker has sent the center by Wrapopt>AveragingStage, with this place, and
may have sent errors and velocities after it. If it has sent none, the open
round begins again, with the center that the server has. Rounds that do not hold
the center begin at any round; at -1, they wait for another generation, while
their variables are written.

rounds: From Wrapopt>AveragingRounds.
worker: The worker's name.
from_generation: The server's generation. With another one, the op has no
  effect.
place: [2] the round that begins with this center, and the new generation, which
  must be later.
job: A scalar, the number of the job that trains the center; 0 if unknown.
restored: Whether the generation has begun.
)doc");

const bool leave_defined = RegisterRoundsOp(
    "Wrapopt>AveragingLeave",
    {"rounds: resource", "worker: string", "process: int64"},
    {{"has_left: bool"}}, R"doc(
Tells that a worker takes part in rounds no more, at the server that leads.

Rounds do not wait for it. Its turn and its wait for one are over; if it is a
member of the open round, its values count. Another process of the worker comes
back by Wrapopt>AveragingJoin or Wrapopt>AveragingEnter.

rounds: From Wrapopt>AveragingRounds.
worker: The worker's name.
process: The process that has the name; 0 to tell a server that was restarted of
  another worker.
has_left: Whether the worker has left. False if another process has its name.
)doc");

const bool state_defined = RegisterRoundsOp(
    "Wrapopt>AveragingState",
    {"rounds: resource"},
    {{"place: int64", {2}}, {"known: string", {-1}}, {"numbers: int64", {5}},
     {"left: string", {-1}}}, R"doc(
The state of averaging rounds.

rounds: From Wrapopt>AveragingRounds.
place: [2] the open round, and its generation.
known: [1 + M] the same, and all members of the round.
numbers: [5] the number of vectors of the center that the rounds hold, the
  number of velocities, the number of workers whose values are no part of the
  round yet, a number that no other rounds have, and the job that trains the
  center.
left: [L] the names of the workers that have left, sorted.
worker: The name of a worker that starts, for which the rounds wait from now on;
  "" for none.
)doc",
    {"worker: string = ''"});

const bool list_defined = RegisterRoundsOp(
    "Wrapopt>AveragingList",
    {},
    {{"names: string", {-1}}, {"settings: string", {-1}},
     {"numbers: int64", {-1, 5}}}, R"doc(
Lists the R averaging rounds that hold a center, of all jobs of a server.

The rounds are those in the default container.

names: [R] their shared_name, sorted.
settings: [R] their settings.
numbers: [R, 5] the open round, its generation, the job that trains the center,
  how many seconds no op has used the rounds, and the bytes of the center and
  its velocities.
)doc");

const bool drop_defined = RegisterRoundsOp(
    "Wrapopt>AveragingDrop",
    {"shared_name: string"},
    {{"dropped: bool"}}, R"doc(
Drops averaging rounds that Wrapopt>AveragingList lists, with their center.

Waits of workers end with an error. The next Wrapopt>AveragingRounds of the name
makes new rounds, without a center.

shared_name: A scalar, that of the rounds.
dropped: False if there are no such rounds.
)doc");

const bool clock_defined = RegisterRoundsOp(
    "Wrapopt>AveragingClock",
    {},
    {{"secs: double"}}, R"doc(
The time of a clock that nobody sets, for a worker's deadline in a round.

secs: Seconds since some time in the past, of this process.
)doc");

const bool raise_defined = RegisterRoundsOp(
    "Wrapopt>AveragingRaise",
    {"code: int32", "message: string"},
    {}, R"doc(
Fails with the error of a round that ran in Python.

code: That of the error, as in tf.errors: in [0, 16], 0 for none.
message: Its text.
)doc");

}  // namespace wrapopt
