// Averaging rounds that servers end themselves, without a chief. Does not
// depend on TensorFlow.
//
// Each of several servers holds a part of the center. One of them leads: it
// gives turns, and it decides who is a member of a round. A worker
//
//   1. enters, at the lead, and gets a turn;
//   2. tells the others which workers are members and which turns are alive,
//      and sends its values in parts to all servers;
//   3. arrives, at the lead, which makes it a member;
//   4. tells the others that, which then use its values and free them;
//   5. gathers, at the lead, until the round is closed;
//   6. lets each server step to the next center, the lead last.
//
// Each call but those of step 2 may be repeated, by any worker. So a worker may
// stop anywhere: others finish the round.
#ifndef WRAPOPT_CC_ENGINE_SERVED_ROUNDS_H_
#define WRAPOPT_CC_ENGINE_SERVED_ROUNDS_H_

#include <cstdint>
#include <map>
#include <mutex>  // NOLINT(build/c++11)
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/arrivals.h"
#include "cc/engine/rounds.h"

namespace wrapopt {

template <class Value>
class ServedRounds : public Rounds<Value> {
  using Base = Rounds<Value>;
  using typename Base::Deferred;

 public:
  using typename Base::Answer;
  using typename Base::Wait;
  using Base::Base;

  struct State {
    Place place;
    bool closed;
    std::vector<std::string> workers;
    Turns turns;
    int64_t staged;  // The number of workers whose values are no members'.
  };

  // Values of a member, which the rounds hold no more.
  struct Taken {
    double weight;
    std::vector<Value> values;
  };

  State state() {
    std::lock_guard<std::mutex> lock(mu_);
    return {this->place(), closed_, this->Workers(), turns_,
            static_cast<int64_t>(arrivals_.size())};
  }

  // Waits for a turn. The answer has none if values are not wanted: if another
  // place is open, the round is closed, or the worker is a member. Without
  // most_turns, the turn is to restore a center: it waits until there is no
  // other turn. `process` is a number that another process does not use.
  void Enter(Wait wait, int64_t process) {
    RoundsStatus status;
    {
      std::lock_guard<std::mutex> lock(mu_);
      Process& known = processes_[wait.worker];
      if (known.current != process) {
        if (known.before == process) {
          status = RoundsStatus::InvalidArgument(Text(
              "worker '", wait.worker, "' of ", this->subject_, " is another ",
              "process now: give each worker a unique name"));
        } else {
          known = {process, known.current};
        }
      }
      if (status.ok()) status = this->CheckRoom(wait.worker);
    }
    if (!status.ok()) return wait.done({status});
    wait.turns = true;
    this->Start(std::move(wait));
  }

  // Adds values [first, first + values.size()) of the `count` values of a
  // worker. Values of a later generation wait for a Restore.
  RoundsStatus Stage(const std::string& worker, const Place& place,
                     int64_t turn, double weight, int64_t count, int64_t first,
                     std::vector<Value> values, bool* accepted) {
    Deferred after(this->timer_);
    std::lock_guard<std::mutex> lock(mu_);
    *accepted = place.generation > this->generation_ ||
                (place == this->place() && !closed_ && !turns_.is_over(turn) &&
                 this->values_.count(worker) == 0);
    if (!*accepted) return RoundsStatus();
    arrivals_.Add(worker, place, turn, weight, count, first, std::move(values),
                  &after.dropped);
    return RoundsStatus();
  }

  // Makes a worker that has a turn a member, and ends its turn.
  RoundsStatus Arrive(const std::string& worker, const Place& place,
                      int64_t turn, bool* accepted, State* state) {
    Deferred after(this->timer_);
    std::lock_guard<std::mutex> lock(mu_);
    const auto* const staged = arrivals_.Find(worker);
    *accepted = place == this->place() && !closed_ &&
                turns_.alive.count(turn) > 0 && staged != nullptr &&
                staged->turn == turn && staged->place == place &&
                staged->is_complete();
    if (*accepted) {
      const RoundsStatus room = this->CheckRoom(worker);
      if (!room.ok()) return room;
      Admit(worker);
      EndTurn(turn, &after);
    }
    *state = {this->place(), closed_, this->Workers(), turns_,
              static_cast<int64_t>(arrivals_.size())};
    return RoundsStatus();
  }

  // Tells a server that does not lead what the lead knows: some members, and
  // the turns that are alive. `turns.newest` is -1 if that is not told.
  bool Follow(const Place& place, const std::vector<std::string>& workers,
              const Turns& turns) {
    Deferred after(this->timer_);
    std::lock_guard<std::mutex> lock(mu_);
    if (place != this->place()) return false;
    for (const std::string& worker : workers) {
      const auto* const staged = arrivals_.Find(worker);
      if (staged != nullptr && staged->place == place &&
          staged->is_complete() && this->values_.count(worker) == 0) {
        Admit(worker);
      }
    }
    if (turns.newest > turns_.newest) {
      turns_ = turns;
      arrivals_.DropOver(turns_, this->generation_, &after.dropped);
    }
    return true;
  }

  // The values that members have brought since the last call. The rounds no
  // longer hold them.
  std::vector<Taken> TakeValues() {
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<Taken> taken;
    for (auto& [worker, member] : this->values_) {
      if (member.values.empty()) continue;
      taken.push_back({member.weight, std::move(member.values)});
      member.values.clear();
    }
    return taken;
  }

  // Begins a generation at `place`, with the values that the worker has staged
  // for it; without any, the open round begins again. No effect unless the
  // server's generation is `from`.
  RoundsStatus Restore(const std::string& worker, int64_t from,
                       const Place& place, std::vector<Value>* values,
                       bool* restored) {
    Deferred after(this->timer_);
    std::lock_guard<std::mutex> lock(mu_);
    *restored = from == this->generation_ && place.generation > from;
    if (!*restored) return RoundsStatus();
    const auto* const staged = arrivals_.Find(worker);
    if (staged != nullptr && staged->place == place && staged->is_complete()) {
      *values = arrivals_.Take(worker).values;
    } else if (place.round != this->open_) {
      return RoundsStatus::FailedPrecondition(Text(
          "worker '", worker, "' must send a center before round ",
          place.round, " of ", this->subject_, " begins, got none; round ",
          this->open_, " is open"));
    }
    this->generation_ = place.generation;
    turns_.newest = last_turn_;  // The lead may have been restarted.
    Open(place.round, &after);
    this->expected_.reset();
    this->AnswerReadyWaits(&after);
    return RoundsStatus();
  }

 protected:
  using Base::closed_;
  using Base::mu_;

  bool is_served() const override { return true; }

  bool GiveTurn(const Wait& wait, Answer* answer) override {
    const bool restores = wait.most_turns == 0;
    const bool wanted =
        wait.place() == this->place() &&
        (restores || (!closed_ && this->values_.count(wait.worker) == 0));
    answer->generation = this->generation_;
    answer->workers = this->Workers();
    if (!wanted) return true;
    const size_t most = restores ? 1 : wait.most_turns;
    if (turns_.alive.size() >= most) return false;
    answer->turn = ++last_turn_;
    turns_.newest = last_turn_;
    turns_.alive.insert(last_turn_);
    answer->turns = turns_;
    ends_[last_turn_] = this->After(
        wait.turn_secs, [turn = last_turn_](Base* self) {
          static_cast<ServedRounds*>(self)->TimeOutTurn(turn);
        });
    return true;
  }

  std::vector<std::string> MembersOf(const Place& ended) const override {
    return ended == ended_ ? members_ : std::vector<std::string>();
  }

  void Open(int64_t round, Deferred* after) override {
    ended_ = {round - 1, this->generation_};
    members_ = this->Workers();
    Base::Open(round, after);
    arrivals_.DropAll(&after->dropped);
    for (const auto& [turn, timer] : ends_) {
      if (timer) this->timer_->Cancel(*timer);
    }
    ends_.clear();
    turns_.alive.clear();
  }

 private:
  struct Process {
    int64_t current = 0;
    int64_t before = 0;
  };

  void Admit(const std::string& worker) {
    auto staged = arrivals_.Take(worker);
    this->values_[worker] = {staged.weight, std::move(staged.values)};
  }

  void EndTurn(int64_t turn, Deferred* after) {
    turns_.alive.erase(turn);
    const auto end = ends_.find(turn);
    if (end != ends_.end()) {
      if (end->second) this->timer_->Cancel(*end->second);
      ends_.erase(end);
    }
    arrivals_.DropOver(turns_, this->generation_, &after->dropped);
    this->AnswerReadyWaits(after);
  }

  void TimeOutTurn(int64_t turn) {
    Deferred after(this->timer_);
    std::lock_guard<std::mutex> lock(mu_);
    if (turns_.alive.count(turn) > 0) EndTurn(turn, &after);
  }

  Arrivals<Value> arrivals_;
  // The last round that ended, and its members.
  Place ended_;
  std::vector<std::string> members_;
  // The lead holds the turns that it gave. Another server holds the turns that
  // the last Follow named.
  Turns turns_;
  int64_t last_turn_ = 0;  // Grows in all rounds and generations.
  std::map<int64_t, std::optional<Timer::Id>> ends_;
  std::map<std::string, Process> processes_;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_SERVED_ROUNDS_H_
