// Attention over a cache of bfloat16 in products of bfloat16: queries and probabilities are rounded to it, sums are float32.
#pragma once
#include "attention/attention.h"

// attend() of attention.h, for what `rounds`: by tiles where the processor has them, else by dot products of vectors.
void attend_rounded(const Attention &a, const AttentionItem &item, const AttentionItem *next);
