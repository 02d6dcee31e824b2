// Success or an error of averaging rounds. Does not depend on TensorFlow.
#ifndef WRAPOPT_CC_PROTOCOLS_ROUNDS_STATUS_H_
#define WRAPOPT_CC_PROTOCOLS_ROUNDS_STATUS_H_

#include <sstream>
#include <string>
#include <utility>

namespace wrapopt {

// Success, or an error with the code of the same name and number in TensorFlow.
struct RoundsStatus {
  enum class Code {
    kOk = 0,
    kCancelled = 1,
    kInvalidArgument = 3,
    kDeadlineExceeded = 4,
    kFailedPrecondition = 9,
    kAborted = 10,
  };

  static RoundsStatus Aborted(std::string message) {
    return {Code::kAborted, std::move(message)};
  }
  static RoundsStatus Cancelled(std::string message) {
    return {Code::kCancelled, std::move(message)};
  }
  static RoundsStatus DeadlineExceeded(std::string message) {
    return {Code::kDeadlineExceeded, std::move(message)};
  }
  static RoundsStatus FailedPrecondition(std::string message) {
    return {Code::kFailedPrecondition, std::move(message)};
  }
  static RoundsStatus InvalidArgument(std::string message) {
    return {Code::kInvalidArgument, std::move(message)};
  }

  bool ok() const { return code == Code::kOk; }

  Code code = Code::kOk;
  std::string message;
};

template <class... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_ROUNDS_STATUS_H_
