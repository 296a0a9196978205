#include "tests/fuzz/targets.h"

#include <array>

namespace semitone::fuzz {

std::span<const Target> targets() {
  static constexpr std::array kTargets{Target{"casts", casts},
                                       Target{"cifar", cifar},
                                       Target{"code", code},
                                       Target{"config", config},
                                       Target{"flags", flags},
                                       Target{"idx", idx},
                                       Target{"image", image},
                                       Target{"lines", lines},
                                       Target{"manifest", manifest},
                                       Target{"messages", messages},
                                       Target{"pickle", pickle},
                                       Target{"policy", policy},
                                       Target{"records", records},
                                       Target{"rendezvous", rendezvous},
                                       Target{"safetensors", safetensors},
                                       Target{"text", text},
                                       Target{"values", values},
                                       Target{"watch", watch},
                                       Target{"weights", weights},
                                       Target{"zip", zip}};
  return kTargets;
}

}  // namespace semitone::fuzz
