// Attention over KV pages. Shapes as in ops.h, layouts in pages.h, products in products.h, factors of keys in rows.h.
//
// The number formats of keys and values are independent, and found page by page: the scores of a page come from the
// product of its keys' format, the softmax is one, and what joins the sums is the product of its values' format.
//   f32, f16  factors are floats
//   q8        the query is rounded to int16 with one scale a row, the softmax weights times the values' scales to int16
//             with one scale a row and page; products and sums of a page are exact in int32
//   q4        the query is rounded to int8 with one scale a block of 32 channels; the weights times the values' scales
//             of a block to int16 with one scale a row, page and block; sums are exact in int32 within these
// A row (one query of one head) goes through a run's pages in order with its own maximum, sum and accumulators. Nothing
// of a row depends on the rows beside it: integer sums have no order, float sums run along channels or tokens, and what
// a row may not see joins them as an exact zero.
//
// Speeds: ns a row and page (64 keys, D = 64) on one Zen 4 thread at 3.4 GHz, AVX2 only, in the cache; q8 / f16.
//   decode, 3 rows        222 / 361   four vectors a register tile, compiler's own order of instructions
//                         204 / 290   sums held in registers by an empty asm (lanes.h); before, all products of a step
//                                     came first and the sums lay in memory
//                         184 / 242   two vectors for 3 rows
//                         175 / 215   three vectors, two steps and one line prefetched a turn, no test for the prefetch
//   prefill, 96 rows      197 / 173   six rows by two vectors
//                         142 / 173   sums held in registers
//                         138 / 168   softmax in stages over six rows; page read as stored
// - decode of 7040 tokens, 30 layers of 3 KV heads, one thread, ms: q8 13.2 without prefetch, 7.7 with a prefetch one
//   page ahead into the first cache level, **5.0 into the second** (f16 10.4, 6.4).
// - Gave nothing: a page widened once to int16 or float32 for 96 rows (q8 2 % faster, f16 4 % slower than as stored);
//   four vectors for one or three rows; eight for one.
// - q4, instructions a row and page (D = 64, 3 rows; counted in the compiler's output, not timed): keys 544, from 704
//   with one group of eight tokens at a time, and q8's 683; values 885, and q8's 683: the nibbles' shifts and masks. It
//   pays where pages come from memory. A step found from the products' own maximum, instead of bounded, took a second
//   pass and a sum across lanes more for each row and block.
// - Not built: maddubs with queries or weights of 7 bits: it saves a quarter of a product's instructions, and small
//   weights beside a large one would all become zero.

#include "rows.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kPageLanes = kPageLen / kLanes;

// ---- softmax of one page ------------------------------------------------------------------------------------------

struct Slots {  // of a page
    int begin, end;
    bool all() const { return begin == 0 && end == kPageLen; }
    bool operator==(const Slots& other) const { return begin == other.begin && end == other.end; }
};

// cap * tanh(x) in powers of two.
Floats capped(Floats x, float cap) {
    const Floats within_one = max(min(x, splat(10.0f)), splat(-10.0f));  // tanh(10) is 1 in float32
    const Floats power = exp2_of(mul(within_one, splat(-2 * kLog2E)));   // e^-2x
    const Floats one = splat(1.0f);
    return mul(div(sub(one, power), add(one, power)), splat(cap * kLog2E));
}

// Scores and then weights of a tile of rows over one page, and what a page's sums are worth.
struct PageTile {
    alignas(32) float scores[kRowTile][kPageLen];  // in powers of two
    alignas(32) float maxima[kLanes];              // by row, as the rest
    alignas(32) float before[kLanes];              // factor of the sums so far
    alignas(32) float heaviest[kLanes];            // largest weight of the page
    alignas(32) float steps[kLanes];               // value of 1 in the factors of the values
    Slots slots[kRowTile];
    int rows;
};

inline Floats slots_of(Floats x, Slots slots, int i, float other) {
    return within(x, slots.begin - i * kLanes, slots.end - i * kLanes, splat(other));
}

// Caps and masks the scores of row r, and returns their largest.
inline float finish_scores(float* scores, Slots slots, float softcap) {
    Floats most = splat(kNothing);
    for (int i = 0; i < kPageLanes; ++i) {
        Floats lanes = load(scores + i * kLanes);
        if (softcap > 0) lanes = capped(lanes, softcap);
        if (!slots.all()) lanes = slots_of(lanes, slots, i, kNothing);
        if (softcap > 0 || !slots.all()) store(scores + i * kLanes, lanes);
        most = max(most, lanes);
    }
    return largest(most);
}

// Scores become weights, 2^(score - maximum); their sum joins `sums` (8 lanes).
inline void exponentiate(float* scores, float maximum, float before, float* sums) {
    Floats sum = mul(load(sums), splat(before));
    for (int i = 0; i < kPageLen; i += kLanes) {
        const Floats weight = exp2_of(sub(load(scores + i), splat(maximum)));
        store(scores + i, weight);
        sum = add(sum, weight);
    }
    store(sums, sum);
}

// Per row: the new maximum, the factor of what came before, the weights and their sum.
void weigh(Rows& rows, int r0, float softcap, PageTile& tile) {
    alignas(32) float old[kLanes] = {}, most[kLanes] = {};
    for (int r = 0; r < tile.rows; ++r) {
        most[r] = finish_scores(tile.scores[r], tile.slots[r], softcap);
        old[r] = rows.maxima[r0 + r];
        tile.maxima[r] = most[r] > old[r] ? most[r] : old[r];
        rows.maxima[r0 + r] = tile.maxima[r];
    }
    for (int r = tile.rows; r < kLanes; ++r) tile.maxima[r] = 0;
    store(tile.before, exp2_of(sub(load(old), load(tile.maxima))));
    store(tile.heaviest, exp2_of(sub(load(most), load(tile.maxima))));
    for (int r = 0; r < tile.rows; ++r)
        exponentiate(tile.scores[r], tile.maxima[r], tile.before[r], rows.sums + static_cast<size_t>(r0 + r) * kLanes);
}

// ---- weights as factors of the values -----------------------------------------------------------------------------

// weights *= the values' scales; returns the largest product.
inline float scale_weights(float* weights, Slots slots, const float* value_scales) {
    Floats most = splat(0.0f);
    for (int i = 0; i < kPageLanes; ++i) {
        Floats product = mul(load(weights + i * kLanes), load(value_scales + i * kLanes));
        if (!slots.all()) product = slots_of(product, slots, i, 0.0f);  // an unused slot's scale may be anything
        store(weights + i * kLanes, product);
        most = max(most, product);
    }
    return largest(most);
}

// What int16 factors are worth is in tile.steps; 1 / step, or 0 where it is so small that its values are zero beside
// any others and the reciprocal could overflow.
inline void invert_steps(const PageTile& tile, float* inverses) {
    constexpr float kLeast = 1e-30f;
    store(inverses, where_at_least(load(tile.steps), kLeast, div(splat(1.0f), load(tile.steps))));
}

// q8: one row of 64 factors after another. Weights become products in place.
inline void share_out(PageTile& tile, const float* value_scales, int16_t* factors) {
    alignas(32) float most[kLanes] = {};
    for (int r = 0; r < tile.rows; ++r) most[r] = scale_weights(tile.scores[r], tile.slots[r], value_scales);
    store(tile.steps, mul(load(most), splat(1 / 32767.0f)));
    alignas(32) float inverses[kLanes];
    invert_steps(tile, inverses);
    for (int r = 0; r < tile.rows; ++r) {
        const Floats inverse = splat(inverses[r]);
        const float* products = tile.scores[r];
        for (int i = 0; i < kPageLen; i += 2 * kLanes)
            store_pairs(factors + r * kPageLen + i,
                        round_to_shorts(mul(load(products + i), inverse), mul(load(products + i + kLanes), inverse)));
    }
}

inline float largest_scale(const float* scales, Slots slots) {
    Floats most = splat(0.0f);
    for (int i = 0; i < kPageLanes; ++i) {
        const Floats magnitude = abs(load(scales + i * kLanes));
        most = max(most, slots.all() ? magnitude : slots_of(magnitude, slots, i, 0.0f));
    }
    return largest(most);
}

inline Floats scaled_weights(const float* weights, const float* scales, Slots slots, int i) {
    const Floats product = mul(load(weights + i * kLanes), load(scales + i * kLanes));
    return slots.all() ? product : slots_of(product, slots, i, 0.0f);
}

// q4, one block of channels: a step that bounds the products, heaviest weight times largest scale, saves a pass over
// them for each block. starts: -8 times the sum of a row's factors. Weights stay.
inline void share_out_block(PageTile& tile, const float* scales, int16_t* factors, int32_t* starts) {
    alignas(32) float bounds[kLanes] = {};
    for (int r = 0; r < tile.rows; ++r) {
        const bool as_before = r > 0 && tile.slots[r] == tile.slots[r - 1];
        bounds[r] = as_before ? bounds[r - 1] : largest_scale(scales, tile.slots[r]);
    }
    store(tile.steps, mul(mul(load(bounds), load(tile.heaviest)), splat(1 / 32767.0f)));
    alignas(32) float inverses[kLanes];
    invert_steps(tile, inverses);
    for (int r = 0; r < tile.rows; ++r) {
        const Floats inverse = splat(inverses[r]);
        Ints sum = no_ints();
        for (int i = 0; i < kPageLanes; i += 2) {
            const Floats low = scaled_weights(tile.scores[r], scales, tile.slots[r], i);
            const Floats high = scaled_weights(tile.scores[r], scales, tile.slots[r], i + 1);
            const Shorts rounded = round_to_shorts(mul(low, inverse), mul(high, inverse));
            store_pairs(factors + r * kPageLen + i * kLanes, rounded);
            sum = add_pair_products(sum, rounded, splat_short(1));
        }
        starts[r] = -8 * total(sum);
    }
}

// ---- one page -----------------------------------------------------------------------------------------------------

struct PageView {
    KvFormat format;
    const uint8_t *keys, *values;              // sides
    const uint8_t *keys_ahead, *values_ahead;  // of the page that is read next, whatever its format
};

PageView view(const Work& work, int index) {
    const KeyRun& keys = work.keys;
    const int32_t page = keys.pages[index], next = index + 1 < keys.count ? keys.pages[index + 1] : keys.next;
    const PageBuffer &arena = work.arena(page), &next_arena = work.arena(next);
    const int head = work.queries.kv_head, row = page % kArenaPages, next_row = next % kArenaPages;
    return {arena.format, key_side(arena, row, head), value_side(arena, row, head),
            key_side(next_arena, next_row, head), value_side(next_arena, next_row, head)};
}

// Slots of the page at `position` that row r may see.
Slots visible(const Work& work, int position, int row) {
    const int query = work.queries.q0 + row / work.group(), window = work.keys.window;
    int begin = work.keys.begin - position, end = (query + 1 < work.keys.end ? query + 1 : work.keys.end) - position;
    if (window > 0 && query - window + 1 - position > begin) begin = query - window + 1 - position;
    return {begin > 0 ? begin : 0, end < kPageLen ? end : kPageLen};
}

template <class Format>
void score_as(const typename Format::Factor* factors, const float* row_scales, const Rows& rows, const PageView& page,
              Slots seen, PageTile& tile) {
    using Element = typename Format::Element;
    const int channels = rows.channels;
    const float* key_scales = reinterpret_cast<const float*>(page.keys + sizeof(Element) * kPageLen * channels);
    const Lattice<Format> keys{reinterpret_cast<const Element*>(page.keys),
                               static_cast<size_t>(kLanes) * Format::kDepth,
                               static_cast<size_t>(kLanes) * channels,
                               seen.begin / kLanes,
                               (seen.end + kLanes - 1) / kLanes,
                               0,
                               channels / Format::kDepth,
                               page.keys_ahead};
    const auto keep = [&](int r, int v, Floats products) {
        if (Format::kScaled) products = mul(products, mul(splat(row_scales[r]), load(key_scales + v * kLanes)));
        store(tile.scores[r] + v * kLanes, products);
    };
    multiply(tile.rows, factors, channels, keys, keep);
}

void score_nibbles(const Rows& rows, int r0, const PageView& page, Slots seen, PageTile& tile) {
    const size_t at = static_cast<size_t>(r0) * rows.blocks;
    const NibbleFactors factors{rows.bytes + at * kBlock, rows.byte_scales + at, rows.byte_starts + at};
    const auto keep = [&](int r, int g, Floats scores) { store(tile.scores[r] + g * kLanes, scores); };
    multiply_nibble_keys(tile.rows, factors, rows.blocks, page.keys, seen.begin / kLanes,
                         (seen.end + kLanes - 1) / kLanes, page.keys_ahead, keep);
}

void score(const Rows& rows, int r0, const PageView& page, Slots seen, PageTile& tile) {
    const size_t at = static_cast<size_t>(r0) * rows.channels;
    switch (page.format.keys) {
        case KvNumber::f32: return score_as<F32>(rows.floats + at, nullptr, rows, page, seen, tile);
        case KvNumber::f16: return score_as<F16>(rows.floats + at, nullptr, rows, page, seen, tile);
        case KvNumber::q8: return score_as<Q8>(rows.shorts + at, rows.short_scales + r0, rows, page, seen, tile);
        case KvNumber::q4: return score_nibbles(rows, r0, page, seen, tile);
    }
}

// What joins the sums of rows from r0 on: vectors from v0 on.
struct AddToSums {
    const Rows& rows;
    const PageTile& tile;
    int r0, v0;
    void operator()(int r, int v, Floats products) const {
        float* sum = rows.values + static_cast<size_t>(r0 + r) * rows.channels + (v0 + v) * kLanes;
        store(sum, mul_add(products, splat(tile.steps[r]), mul(load(sum), splat(tile.before[r]))));
    }
};

template <class Format>
void add_values_as(const typename Format::Factor* factors, const Rows& rows, int r0, const PageView& page, Slots seen,
                   const PageTile& tile) {
    const int channels = rows.channels;
    const Lattice<Format> values{reinterpret_cast<const typename Format::Element*>(page.values),
                                 static_cast<size_t>(channels) * Format::kDepth,
                                 static_cast<size_t>(kLanes) * Format::kDepth,
                                 0,
                                 channels / kLanes,
                                 seen.begin / Format::kDepth,
                                 (seen.end + Format::kDepth - 1) / Format::kDepth,
                                 page.values_ahead};
    multiply(tile.rows, factors, kPageLen, values, AddToSums{rows, tile, r0, 0});
}

void add_nibble_values(const Rows& rows, int r0, const PageView& page, Slots seen, PageTile& tile) {
    const int channels = rows.channels;
    const auto* halves = reinterpret_cast<const uint16_t*>(page.values + kPageLen * channels / 2);
    alignas(32) int16_t factors[kRowTile * kPageLen];
    for (int b = 0; b < rows.blocks; ++b) {
        alignas(32) float scales[kPageLen];
        for (int i = 0; i < kPageLen; i += kLanes) store(scales + i, load_halves(halves + b * kPageLen + i));
        int32_t starts[kRowTile];
        share_out_block(tile, scales, factors, starts);
        const int left = channels - b * kBlock, vectors = (left < kBlock ? left : kBlock) / kLanes;
        const size_t at = sizeof(uint32_t) * b * kBlock;
        const NibbleValues values{page.values + at, sizeof(uint32_t) * channels, vectors, seen.begin / kLanes,
                                  (seen.end + kLanes - 1) / kLanes, page.values_ahead + at};
        multiply_nibble_values(tile.rows, factors, starts, values, AddToSums{rows, tile, r0, b * kBlock / kLanes});
    }
}

void add_float_values(const Rows& rows, int r0, const PageView& page, Slots seen, PageTile& tile) {
    store(tile.steps, splat(1.0f));
    if (page.format.values == KvNumber::f32) return add_values_as<F32>(tile.scores[0], rows, r0, page, seen, tile);
    add_values_as<F16>(tile.scores[0], rows, r0, page, seen, tile);
}

void add_byte_values(const Rows& rows, int r0, const PageView& page, Slots seen, PageTile& tile) {
    alignas(32) int16_t factors[kRowTile * kPageLen];
    share_out(tile, reinterpret_cast<const float*>(page.values + kPageLen * rows.channels), factors);
    add_values_as<Q8>(factors, rows, r0, page, seen, tile);
}

// Rows [r0, r0 + count), at most kRowTile of them, over one page.
void attend_row_tile(const Work& work, Rows& rows, int r0, int count, int position, const PageView& page) {
    PageTile tile;
    tile.rows = count;
    for (int r = 0; r < count; ++r) tile.slots[r] = visible(work, position, r0 + r);
    const Slots seen{tile.slots[0].begin, tile.slots[count - 1].end};  // what any of the rows may see
    score(rows, r0, page, seen, tile);
    weigh(rows, r0, work.shape.softcap, tile);
    switch (page.format.values) {
        case KvNumber::f32:
        case KvNumber::f16: return add_float_values(rows, r0, page, seen, tile);
        case KvNumber::q8: return add_byte_values(rows, r0, page, seen, tile);
        case KvNumber::q4: return add_nibble_values(rows, r0, page, seen, tile);
    }
}

// The scales that lie behind the elements of a side; the products prefetch everything else.
void prefetch_scales(size_t elements, size_t bytes, const uint8_t* side) {
    for (size_t at = elements; at < bytes; at += 64) prefetch(side + at);
}

void prefetch_key_scales(const PageView& page, int head_dim) {
    const KvNumber keys = page.format.keys;
    if (keys == KvNumber::q8) prefetch_scales(element_bytes(keys, head_dim), key_side_bytes(keys, head_dim), page.keys_ahead);
}

// Rows [r0, r1) over the run's page `index`, at `position`.
void attend_page(const Work& work, Rows& rows, int r0, int r1, int index, int position) {
    const PageView page = view(work, index);
    const KvNumber values = page.format.values;
    const int dim = work.shape.head_dim;
    prefetch_key_scales(page, dim);
    prefetch_scales(element_bytes(values, dim), value_side_bytes(values, dim), page.values_ahead);
    for (int r = r0; r < r1; r += kRowTile)
        attend_row_tile(work, rows, r, r1 - r < kRowTile ? r1 - r : kRowTile, position, page);
}

// ---- one run ------------------------------------------------------------------------------------------------------

void write_part(const Rows& rows, int head_dim, float* part) {
    for (int r = 0; r < rows.count; ++r, part += head_dim + 2) {
        part[0] = rows.maxima[r] * kLn2;
        part[1] = total(load(rows.sums + static_cast<size_t>(r) * kLanes));
        std::memcpy(part + 2, rows.values + static_cast<size_t>(r) * rows.channels, sizeof(float) * head_dim);
    }
}

Rows rows_of(const AttentionShape& shape, int queries) {
    Rows rows{};
    rows.count = queries * (shape.heads / shape.kv_heads);
    rows.channels = padded(shape.head_dim);
    rows.blocks = blocks_of(shape.head_dim);
    return rows;
}

}  // namespace

size_t attend_scratch_bytes(const AttentionShape& shape, int queries) {
    Rows rows = rows_of(shape, queries);
    return lay_out(rows, nullptr);
}

void attend(const PageBuffer* arenas, const AttentionShape& shape, const KeyRun& keys, const QueryRows& queries,
            float* part, void* scratch) {
    const Work work{arenas, shape, keys, queries};
    Rows rows = rows_of(shape, queries.q1 - queries.q0);
    lay_out(rows, static_cast<uint8_t*>(scratch));
    start_rows(work, rows);
    for (int i = 0; i < keys.count; ++i) {
        const int position = (keys.first_page + i) * kPageLen, page_end = position + kPageLen;
        const int begin = keys.begin > position ? keys.begin : position;
        const int end = keys.end < page_end ? keys.end : page_end;
        if (begin >= end) continue;
        const int last_seen_by = keys.window > 0 ? end - 1 + keys.window : queries.q1;
        const int begin_query = queries.q0 > begin ? queries.q0 : begin;
        const int end_query = queries.q1 < last_seen_by ? queries.q1 : last_seen_by;
        if (begin_query >= end_query) continue;
        attend_page(work, rows, (begin_query - queries.q0) * work.group(), (end_query - queries.q0) * work.group(), i,
                    position);
    }
    write_part(rows, shape.head_dim, part);
}

void weigh_pages(const PageBuffer* arenas, const AttentionShape& shape, const int32_t* pages, int count,
                 const QueryRows& query, float* maxima, float* sums, int stride, void* scratch) {
    if (count == 0) return;
    const KeyRun keys{pages, count, 0, 0, count * kPageLen, 0, pages[count - 1]};
    const Work work{arenas, shape, keys, query};
    const Slots whole{0, kPageLen};
    Rows rows = rows_of(shape, 1);
    lay_out(rows, static_cast<uint8_t*>(scratch));
    start_rows(work, rows);
    for (int i = 0; i < count; ++i) {
        const PageView page = view(work, i);
        prefetch_key_scales(page, shape.head_dim);
        for (int r0 = 0; r0 < rows.count; r0 += kRowTile) {
            PageTile tile;
            tile.rows = rows.count - r0 < kRowTile ? rows.count - r0 : kRowTile;
            for (int r = 0; r < tile.rows; ++r) {
                tile.slots[r] = whole;
                rows.maxima[r0 + r] = kNothing;
                store(rows.sums + static_cast<size_t>(r0 + r) * kLanes, splat(0.0f));
            }
            score(rows, r0, page, whole, tile);
            weigh(rows, r0, shape.softcap, tile);
            for (int r = r0; r < r0 + tile.rows; ++r) {
                maxima[static_cast<size_t>(r) * stride + i] = rows.maxima[r];
                sums[static_cast<size_t>(r) * stride + i] = total(load(rows.sums + static_cast<size_t>(r) * kLanes));
            }
        }
    }
}

void merge_parts(const float* parts, size_t part_stride, int count, int head_dim, float* out) {
    float maximum = kNothing, sum = 0;
    for (int s = 0; s < count; ++s) maximum = parts[s * part_stride] > maximum ? parts[s * part_stride] : maximum;
    std::memset(out, 0, sizeof(float) * head_dim);
    for (int s = 0; s < count; ++s) {
        const float* part = parts + s * part_stride;
        const float weight = exp2_of((part[0] - maximum) * kLog2E);
        sum += weight * part[1];
        for (int c = 0; c < head_dim; ++c) out[c] += weight * part[2 + c];
    }
    for (int c = 0; c < head_dim; ++c) out[c] /= sum;
}

}  // namespace heedful::HEEDFUL_VARIANT
