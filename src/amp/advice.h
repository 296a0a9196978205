#pragma once

// Internal interface: other rooms include this header.

#include "semitone/amp/advice.h"

#include <vector>

namespace semitone::amp {

// The facts about the device of this type that models are on.
DeviceFacts facts_of(c10::DeviceType type, const std::vector<Model>& models);

// Whether 16-bit convolutions are faster in channels last: on CPUs and tensor cores.
bool prefers_channels_last(const DeviceFacts& device);

// Logs each text once per process, on rank 0.
void log_advice(const std::vector<Advice>& advice);

}  // namespace semitone::amp
