// Attention over a cache of bfloat16 by tiles (tiles.h), where the processor has them.
#pragma once
#include "kv.h"

// attend() of kv.h, for what is `tiled`.
void attend_by_tiles(const Attention &a, const QueryGroup &group, int64_t head);
