// The workers of averaging rounds: their names, the processes that use these,
// and those that a round waits for. Does not depend on TensorFlow.
#ifndef WRAPOPT_CC_PROTOCOLS_WORKERS_H_
#define WRAPOPT_CC_PROTOCOLS_WORKERS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace wrapopt {

template <class Value>
std::vector<std::string> Keys(const std::map<std::string, Value>& map) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : map) keys.push_back(key);
  return keys;
}

// The workers that are known by their names, and the processes that use these.
class Processes {
 public:
  // False if another process has taken the name of `process`, or the worker has
  // left. A new process takes the name.
  bool IsCurrent(const std::string& worker, int64_t process) {
    const auto [found, is_new] =
        processes_.try_emplace(worker, Owners{process});
    Owners& owners = found->second;
    const bool has_left = left_.count(worker) > 0;
    if (owners.current == process) return !has_left;
    if (owners.before.count(process) > 0) return false;
    owners.before.insert(owners.current);
    owners.current = process;
    left_.erase(worker);
    return true;
  }

  // Whether all of num_workers workers are known, without this one and those
  // that have left. If not, the worker takes the place of one that has left.
  bool IsFull(const std::string& worker, int64_t num_workers) {
    if (processes_.count(worker) > 0 || size() < num_workers) return false;
    if (size() - num_left() >= num_workers) return true;
    processes_.erase(*left_.begin());
    left_.erase(left_.begin());
    return false;
  }

  // Whether a process would take the name from another one.
  bool IsTaken(const std::string& worker, int64_t process) const {
    const auto found = processes_.find(worker);
    return found != processes_.end() && found->second.current != process &&
           found->second.before.count(process) == 0;
  }

  // Whether the worker has left, as its process tells. The process of a worker
  // that others tell of is 0.
  bool Leave(const std::string& worker, int64_t process) {
    const auto [found, is_new] =
        processes_.try_emplace(worker, Owners{process});
    if (found->second.current == process) left_.insert(worker);
    return left_.count(worker) > 0;
  }

  bool Has(const std::string& worker) const {
    return processes_.count(worker) > 0;
  }
  int64_t size() const { return processes_.size(); }
  std::vector<std::string> Names() const { return Keys(processes_); }

  const std::set<std::string>& left() const { return left_; }
  int64_t num_left() const { return left_.size(); }

 private:
  // The processes of a name.
  struct Owners {
    int64_t current;
    std::set<int64_t> before = {};
  };
  std::map<std::string, Owners> processes_;
  std::set<std::string> left_;
};

// The workers that a round waits for: all at first.
class Expected {
 public:
  void All() { names_.reset(); }
  void Only(const std::vector<std::string>& names) {
    names_ = std::set<std::string>(names.begin(), names.end());
  }
  void Add(const std::string& name) {
    if (names_) names_->insert(name);
  }

  // Whether all have come that are expected, if these are not all workers.
  template <class HasCome>
  bool HaveCome(HasCome has_come) const {
    return names_ && std::all_of(names_->begin(), names_->end(), has_come);
  }

 private:
  std::optional<std::set<std::string>> names_;  // nullopt: all.
};

// A name in quotes. Any bytes may be in a name, but not in a log or an error.
inline std::string InQuotes(const std::string& name) {
  std::string quoted = "'";
  for (const unsigned char c : name) {
    if (c >= ' ' && c <= '~' && c != '\'' && c != '\\') {
      quoted += static_cast<char>(c);
    } else {
      constexpr char kDigits[] = "0123456789abcdef";
      quoted += {'\\', 'x', kDigits[c / 16], kDigits[c % 16]};
    }
  }
  return quoted + "'";
}

inline std::string InQuotes(const std::vector<std::string>& names) {
  std::string quoted;
  for (const std::string& name : names) {
    quoted += (quoted.empty() ? "" : ", ") + InQuotes(name);
  }
  return names.empty() ? "none" : quoted;
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_WORKERS_H_
