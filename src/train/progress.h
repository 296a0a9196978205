#pragma once

#include "src/train/observer.h"

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

namespace semitone::train {

// Displays the progress of a training. On a terminal it redraws one line ten times a second:
//
//     O1 float16  epoch 2/3 [=======>    ] 350/600  loss 0.0345  scale 32768  6300 images/s  0:12
//     left
//
// A narrow terminal omits whole fields, the remaining time last. Without a terminal, a line is
// printed every `every` steps. A line is always printed after a resume, for a step with infs or NaNs,
// for a spike of the loss and a rollback, at the end of each epoch and for the test.
class Progress : public Observer {
 public:
  // @param out      must outlive this object
  // @param label    prefix of every line: "O1 float16"
  // @param columns  width of the terminal; 0: no terminal, no moving line
  // @param every    steps between lines without a terminal; 0: no such lines
  Progress(std::ostream& out, std::string label, int columns, std::int64_t every = 100);
  // Ends the moving line.
  ~Progress() override;

  using Observer::on;
  void on(const Resumed& resumed) override;
  void on(const TrainingBegins& begin) override;
  void on(const StepDone& step) override;
  void on(const NonFiniteStep& step) override;
  void on(const LossSpike& spike) override;
  void on(const RolledBack& rolled_back) override;
  void on(const EpochDone& epoch) override;
  void on(const Tested& tested) override;

 private:
  void draw(const StepDone& step);
  void say(const StepDone& step);
  void clear();

  std::ostream& out_;
  std::string label_;
  int columns_;
  std::int64_t every_;
  DataKind kind_ = kImages;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace semitone::train
