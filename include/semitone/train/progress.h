#pragma once

#include "semitone/train/trainer.h"

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

namespace semitone::train {

/// Shows how a training goes on. With a terminal, one line that is drawn again ten times a second:
///
///     O1 float16  epoch 2/3 [=======>    ] 350/600  loss 0.0345  scale 32768  6300 images/s  0:12
///     left
///
/// and always a line at the end of each epoch and one for the test.
class Progress : public Observer {
 public:
  /// @param out      must outlive this object
  /// @param label    begins every line: "O1 float16"
  /// @param columns  width of the terminal; 0: no terminal, no moving line
  Progress(std::ostream& out, std::string label, int columns);
  /// Ends the moving line.
  ~Progress() override;

  using Observer::on;
  void on(const StepDone& step) override;
  void on(const EpochDone& epoch) override;
  void on(const Tested& tested) override;

 private:
  void clear();

  std::ostream& out_;
  std::string label_;
  int columns_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace semitone::train
