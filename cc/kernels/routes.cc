// Wrapopt>Route, RouteBack, Send and Receive: transfers between devices without
// an edge of the graph, by the rendezvous of the step.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/framework/rendezvous.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace wrapopt {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataTypeString;
using tensorflow::DeviceNameUtils;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Rendezvous;
using tensorflow::RendezvousInterface;
using tensorflow::Tensor;
using tensorflow::tstring;

// Names of devices are full.
struct Route {
  std::string from;
  // Tells the device from another one of that name, before its task was
  // restarted.
  uint64_t incarnation;
  std::string to;

  std::string ToString() const {
    return absl::StrCat(from, ";", incarnation, ";", to);
  }
};

absl::Status Parse(const Tensor& tensor, Route* route) {
  if (tensor.dims() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("route misshapen: got ", tensor.shape().DebugString(),
                     " but expected [] (a scalar)"));
  }
  const std::string text = tensor.scalar<tstring>()();
  const std::vector<std::string> parts = absl::StrSplit(text, ';');
  if (parts.size() == 3 && absl::SimpleAtoi(parts[1], &route->incarnation)) {
    route->from = parts[0];
    route->to = parts[2];
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "route must come from Wrapopt>Route or Wrapopt>RouteBack, got '", text,
      "'"));
}

Route RouteTo(OpKernelContext* ctx, std::string to) {
  return {ctx->device()->name(), ctx->device()->attributes().incarnation(),
          std::move(to)};
}

absl::Status ReadRoute(OpKernelContext* ctx, Route* route) {
  const Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->input("route", &tensor));
  return Parse(*tensor, route);
}

// The device that an op must be on: else the two ends would wait for each other
// until the step is ended.
absl::Status CheckDevice(OpKernelContext* ctx, const std::string& expected) {
  if (ctx->device()->name() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      ctx->op_kernel().type_string(), " '", ctx->op_kernel().name(),
      "' must be on the device '", expected, "', as its route says, got '",
      ctx->device()->name(),
      "': name the jobs and tasks of both devices in full"));
}

absl::Status WriteRoute(OpKernelContext* ctx, const Route& route) {
  Tensor* output;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, {}, &output));
  output->scalar<tstring>()() = route.ToString();
  return absl::OkStatus();
}

class RouteOp : public OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string to;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("to", &to));
    OP_REQUIRES(ctx, DeviceNameUtils::ParseFullOrLocalName(to, &to_),
                absl::InvalidArgumentError(
                    absl::StrCat("to must name a device, got '", to, "'")));
  }

  void Compute(OpKernelContext* ctx) override {
    DeviceNameUtils::ParsedName to;
    OP_REQUIRES(
        ctx, DeviceNameUtils::ParseFullName(ctx->device()->name(), &to),
        absl::InternalError(absl::StrCat("the device has no full name: '",
                                         ctx->device()->name(), "'")));
    if (to_.has_job) to.job = to_.job;
    if (to_.has_replica) to.replica = to_.replica;
    if (to_.has_task) to.task = to_.task;
    to.type = to_.has_type ? to_.type : tensorflow::DEVICE_CPU;
    to.id = to_.has_id ? to_.id : 0;
    OP_REQUIRES_OK(
        ctx, WriteRoute(ctx, RouteTo(ctx, DeviceNameUtils::ParsedNameToString(
                                              to))));
  }

 private:
  DeviceNameUtils::ParsedName to_;
};

class RouteBackOp : public OpKernel {
 public:
  explicit RouteBackOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    Route route;
    OP_REQUIRES_OK(ctx, ReadRoute(ctx, &route));
    OP_REQUIRES_OK(ctx, CheckDevice(ctx, route.to));
    OP_REQUIRES_OK(ctx, WriteRoute(ctx, RouteTo(ctx, route.from)));
  }
};

absl::Status ReadChannel(OpKernelConstruction* ctx, std::string* channel) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("channel", channel));
  // That ends a name in the rendezvous.
  if (!channel->empty() && channel->find(';') == std::string::npos) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "channel must be a name without ';', got '", *channel, "'"));
}

absl::Status MakeKey(OpKernelContext* ctx, const Route& route,
                     const std::string& channel, Rendezvous::ParsedKey* key) {
  if (ctx->rendezvous() == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(ctx->op_kernel().type_string(),
                     " must run in a step of a session or function, got none"));
  }
  return Rendezvous::ParseKey(
      Rendezvous::CreateKey(route.from, route.incarnation, route.to,
                            absl::StrCat("wrapopt:", channel),
                            ctx->frame_iter()),
      key);
}

class SendOp : public OpKernel {
 public:
  explicit SendOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadChannel(ctx, &channel_));
  }

  void Compute(OpKernelContext* ctx) override {
    Route route;
    OP_REQUIRES_OK(ctx, ReadRoute(ctx, &route));
    OP_REQUIRES_OK(ctx, CheckDevice(ctx, route.from));
    Rendezvous::ParsedKey key;
    OP_REQUIRES_OK(ctx, MakeKey(ctx, route, channel_, &key));
    RendezvousInterface::Args args;
    args.device_context = ctx->op_device_context();
    constexpr int kValue = 1;
    args.alloc_attrs = ctx->input_alloc_attr(kValue);
    OP_REQUIRES_OK(ctx, ctx->rendezvous()->Send(key, args, ctx->input(kValue),
                                                /*is_dead=*/false));
  }

 private:
  std::string channel_;
};

class ReceiveOp : public AsyncOpKernel {
 public:
  explicit ReceiveOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadChannel(ctx, &channel_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shape", &shape_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Route route;
    OP_REQUIRES_OK_ASYNC(ctx, ReadRoute(ctx, &route), done);
    OP_REQUIRES_OK_ASYNC(ctx, CheckDevice(ctx, route.to), done);
    Rendezvous::ParsedKey key;
    OP_REQUIRES_OK_ASYNC(ctx, MakeKey(ctx, route, channel_, &key), done);
    RendezvousInterface::Args args;
    args.device_context = ctx->op_device_context();
    args.alloc_attrs = ctx->output_alloc_attr(0);
    args.cancellation_manager = ctx->cancellation_manager();
    ctx->rendezvous()->RecvAsync(
        key, args,
        [this, ctx, done = std::move(done)](
            const absl::Status& status, const RendezvousInterface::Args&,
            const RendezvousInterface::Args&, const Tensor& value, bool) {
          ctx->SetStatus(status);
          if (status.ok()) ctx->SetStatus(Check(value));
          if (ctx->status().ok()) ctx->set_output(0, value);
          done();
        });
  }

 private:
  absl::Status Check(const Tensor& value) const {
    if (value.dtype() != dtype_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the value of channel '", channel_, "' must be of dtype ",
          DataTypeString(dtype_), ", got ", DataTypeString(value.dtype())));
    }
    if (shape_.IsCompatibleWith(value.shape())) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "the value of channel '", channel_, "' misshapen: got ",
        value.shape().DebugString(), " but expected ", shape_.DebugString()));
  }

  std::string channel_;
  tensorflow::DataType dtype_;
  tensorflow::PartialTensorShape shape_;
};

#define WRAPOPT_REGISTER(op, Kernel)                                          \
  REGISTER_KERNEL_BUILDER(Name("Wrapopt>" op).Device(tensorflow::DEVICE_CPU), \
                          Kernel)

WRAPOPT_REGISTER("Route", RouteOp);
WRAPOPT_REGISTER("RouteBack", RouteBackOp);
WRAPOPT_REGISTER("Send", SendOp);
WRAPOPT_REGISTER("Receive", ReceiveOp);

#undef WRAPOPT_REGISTER

}  // namespace
}  // namespace wrapopt
