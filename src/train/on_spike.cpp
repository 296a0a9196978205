#include "src/train/on_spike.h"

#include "semitone/core/error.h"

#include <string>

namespace semitone::train {

std::string_view name_of(OnSpike action) {
  switch (action) {
    case OnSpike::skip:
      return "skip";
    case OnSpike::lower_scale:
      return "lower-scale";
    case OnSpike::rollback:
      return "rollback";
    case OnSpike::none:
      break;
  }
  return "none";
}

OnSpike parse_on_spike(std::string_view name) {
  for (const OnSpike action :
       {OnSpike::none, OnSpike::skip, OnSpike::lower_scale, OnSpike::rollback}) {
    if (name == name_of(action)) return action;
  }
  throw Error("train.on_spike", "none, skip, lower-scale or rollback",
              "'" + std::string(name) + "'");
}

}  // namespace semitone::train
