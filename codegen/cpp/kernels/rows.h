// Kernels that work on one row at a time: lookups, norms, activations, elementwise arithmetic.
#pragma once
#include <initializer_list>

#include "gemm.h"

namespace inferc {

// Returns the next `count` elements of the memory at `at`, and moves that after them, to a multiple of 64 bytes.
template <class I>
INLINE I* take(char*& at, i64 count) {
  I* from = reinterpret_cast<I*>(at);
  at += (count * i64(sizeof(I)) + 63) / 64 * 64;
  return from;
}

// The rows per ticket that make a piece large enough to be worth taking (a few thousand elements).
INLINE i64 row_grain(i64 width) { return width >= 4096 ? 1 : 4096 / width; }

template <class T, class I>
KERNEL void embedding(Team& team, const T* table, const I* ids, i64 rows, i64 width, Rows<T> out) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) memcpy(out[row], table + i64(ids[row]) * width, width * sizeof(T));
  });
}

// Looks rows up in the panels that the tied LM head multiplies by.
template <class T>
KERNEL void embedding_panel(Team& team, Panels<T> table, const i32* ids, i64 rows, Rows<T> out) {
  constexpr i64 unit = Dot<T>::unit;
  team.each(rows, 1, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      const T* from = table.panel(ids[row] / 16) + ids[row] % 16 * unit;
      T* to = out[row];
      for (i64 k = 0; k < table.k; ++k) to[k] = from[k / unit * 16 * unit + k % unit];
    }
  });
}

// Looks up rows in int8, and multiplies each by its scale.
template <class T, class I>
KERNEL void embedding_int8(Team& team, const i8* table, const float* scale, const I* ids, i64 rows, i64 width,
                           Rows<T> out) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      const i8* from = table + i64(ids[row]) * width;
      for (i64 k = 0; k < width; ++k) from_float(out[row][k], float(from[k]) * scale[ids[row]]);
    }
  });
}
template <class T>
KERNEL void embedding_panel_int8(Team& team, Panels<i8> table, const float* scale, const i32* ids, i64 rows,
                                 Rows<T> out) {
  team.each(rows, 1, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      const i8* from = table.panel(ids[row] / 16) + ids[row] % 16 * 4;
      for (i64 k = 0; k < table.k; ++k) from_float(out[row][k], float(from[k / 4 * 64 + k % 4]) * scale[ids[row]]);
    }
  });
}

template <class T>
KERNEL void index_select(Team& team, Rows<const T> x, const i32* index, i64 rows, i64 width, Rows<T> out) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) memcpy(out[row], x[index[row]], width * sizeof(T));
  });
}

// One of the values that are concatenated: [rows, heads * width], or one head that is used for all heads.
template <class T>
struct Part {
  Rows<const T> data;
  i64 width, heads;
};

// Concatenates the parts of each head: out [rows, heads * the sum of the widths].
template <class T>
KERNEL void cat(Team& team, i64 rows, i64 heads, std::initializer_list<Part<T>> parts, Rows<T> out) {
  i64 total = 0;
  for (const Part<T>& part : parts) total += part.width;
  team.each(rows, row_grain(heads * total), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      i64 column = 0;
      for (const Part<T>& part : parts) {
        for (i64 head = 0; head < heads; ++head)
          memcpy(out[row] + head * total + column, part.data[row] + head % part.heads * part.width,
                 part.width * sizeof(T));
        column += part.width;
      }
    }
  });
}

// Changes heads of `had` elements to heads of `dim`: cut, or padded with zeros.
template <class T>
KERNEL void resize_heads(Team& team, Rows<const T> x, i64 rows, i64 heads, i64 had, i64 dim, Rows<T> out) {
  const i64 kept = had < dim ? had : dim;
  team.each(rows, row_grain(heads * dim), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      for (i64 head = 0; head < heads; ++head) {
        memcpy(out[row] + head * dim, x[row] + head * had, kept * sizeof(T));
        memset(static_cast<void*>(out[row] + head * dim + kept), 0, (dim - kept) * sizeof(T));
      }
  });
}

// Computes f(a, b) in float32, rounded once.
template <class T, class F>
INLINE void zip(Team& team, Rows<const T> a, Rows<const T> b, i64 rows, i64 width, Rows<T> out, F f) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      each_vector(width, [&](i64 i, auto n) { store(out[row] + i, f(load(a[row] + i, n), load(b[row] + i, n)), n); });
  });
}
template <class T>
KERNEL void add(Team& team, Rows<const T> a, Rows<const T> b, i64 rows, i64 width, Rows<T> out) {
  zip<T>(team, a, b, rows, width, out, [](Vec x, Vec y) { return add(x, y); });
}
template <class T>
KERNEL void mul(Team& team, Rows<const T> a, Rows<const T> b, i64 rows, i64 width, Rows<T> out) {
  zip<T>(team, a, b, rows, width, out, [](Vec x, Vec y) { return mul(x, y); });
}
template <class T>
KERNEL void silu_mul(Team& team, Rows<const T> gate, Rows<const T> up, i64 rows, i64 width, Rows<T> out) {
  zip<T>(team, gate, up, rows, width, out, [](Vec x, Vec y) { return mul(silu(x), y); });
}
template <class T>
KERNEL void gelu_mul(Team& team, Rows<const T> gate, Rows<const T> up, i64 rows, i64 width, Rows<T> out) {
  zip<T>(team, gate, up, rows, width, out, [](Vec x, Vec y) { return mul(gelu(x), y); });
}
template <class T>
KERNEL void gelu_tanh_mul(Team& team, Rows<const T> gate, Rows<const T> up, i64 rows, i64 width, Rows<T> out) {
  zip<T>(team, gate, up, rows, width, out, [](Vec x, Vec y) { return mul(gelu_tanh(x), y); });
}
template <class T>
KERNEL void add_scalar(Team& team, Rows<const T> a, float b, i64 rows, i64 width, Rows<T> out) {
  zip<T>(team, a, a, rows, width, out, [b](Vec x, Vec) { return add(x, set1(b)); });
}
template <class T>
KERNEL void mul_scalar(Team& team, Rows<const T> a, float b, i64 rows, i64 width, Rows<T> out) {
  zip<T>(team, a, a, rows, width, out, [b](Vec x, Vec) { return mul(x, set1(b)); });
}

// Generated arithmetic: f(row, part, i, n) gives n elements from i on, of one of the `parts` of a row of `width` each.
template <class T, class F>
INLINE void pointwise(Team& team, i64 rows, i64 parts, i64 width, Rows<T> out, F f) {
  team.each(rows, row_grain(parts * width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      for (i64 part = 0; part < parts; ++part)
        for (i64 i = 0; i < width; i += LANES)
          store(out[row] + part * width + i, f(row, part, i, width - i), width - i);
  });
}

// The parameters of a norm: see ops/norms.py. `early`: round the normalised x before it is scaled.
struct Norm {
  float eps, offset;
  bool early;
};

template <class T>
INLINE void norm_row(const T* x, const T* weight, const Norm& norm, i64 width, T* out) {
  Vec squares = zero();
  each_vector(width, [&](i64 i, auto n) {
    const Vec v = load(x + i, n);
    squares = fma(v, v, squares);
  });
  const Vec scale = set1(1.0f / sqrtf(sum(squares) / float(width) + norm.eps));
  auto run = [&]<bool PLAIN, bool EARLY>() {  // PLAIN: has weights, and without an offset
    each_vector(width, [&](i64 i, auto n) {
      Vec v = mul(load(x + i, n), scale), w = PLAIN || weight ? load(weight + i, n) : set1(1.0f);
      if (!PLAIN && norm.offset != 0.0f) w = add(w, set1(norm.offset));
      if (EARLY) v = rounded<T>(v), w = PLAIN ? w : rounded<T>(w);
      store(out + i, mul(v, w), n);
    });
  };
  const bool is_plain = weight && norm.offset == 0.0f;
  if (norm.early) is_plain ? run.template operator()<true, true>() : run.template operator()<false, true>();
  else is_plain ? run.template operator()<true, false>() : run.template operator()<false, false>();
}

// Normalises each of `parts` consecutive pieces of `width` elements of a row on its own (heads, or the whole row).
template <class T>
KERNEL void rms_norm(Team& team, Rows<const T> x, const T* weight, Norm norm, i64 rows, i64 parts, i64 width,
                     Rows<T> out) {
  team.each(rows * parts, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      i64 row = i / parts, part = i % parts * width;
      norm_row(x[row] + part, weight, norm, width, out[row] + part);
    }
  });
}

template <class T>
struct LayerNormedRow {
  const T *x, *weight, *bias;
  i64 width;
  Vec mean, scale;

  INLINE LayerNormedRow(const T* x_, const T* weight_, const T* bias_, float eps, i64 width_)
      : x(x_), weight(weight_), bias(bias_), width(width_) {
    Vec total = zero(), squares = zero();
    for (i64 i = 0; i < width; i += LANES) total = add(total, load(x + i, width - i));
    mean = set1(sum(total) / float(width));
    for (i64 i = 0; i < width; i += LANES) {
      Vec v = keep(sub(load(x + i, width - i), mean), 0, int(width - i), zero());
      squares = fma(v, v, squares);
    }
    scale = set1(1.0f / sqrtf(sum(squares) / float(width) + eps));
  }
  INLINE Vec operator()(i64 i, i64 n) const {
    Vec v = mul(sub(load(x + i, n), mean), scale);
    if (weight) v = mul(v, load(weight + i, n));
    return bias ? add(v, load(bias + i, n)) : v;
  }
};

template <class T>
INLINE void layer_norm_row(const T* x, const T* weight, const T* bias, float eps, i64 width, T* out) {
  LayerNormedRow<T> normed(x, weight, bias, eps, width);
  each_vector(width, [&](i64 i, auto n) { store(out + i, normed(i, n), n); });
}

// The weights and biases (or null) of part p of a row start at p * own elements.
template <class T>
KERNEL void layer_norm(Team& team, Rows<const T> x, const T* weight, const T* bias, float eps, i64 rows, i64 parts,
                       i64 width, i64 own, Rows<T> out) {
  team.each(rows * parts, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      i64 row = i / parts, part = i % parts;
      const T* w = weight ? weight + part * own : nullptr;
      const T* b = bias ? bias + part * own : nullptr;
      layer_norm_row(x[row] + part * width, w, b, eps, width, out[row] + part * width);
    }
  });
}

template <class T>
INLINE void add_row(const T* x, const T* residual, i64 width, T* total) {
  each_vector(width, [&](i64 i, auto n) { store(total + i, add(load(x + i, n), load(residual + i, n)), n); });
}

// Computes total = x + residual, rounded, and its norm. `total` may be the same memory as `residual` or `x`.
template <class T>
KERNEL void rms_norm_add(Team& team, Rows<const T> x, Rows<const T> residual, const T* weight, Norm norm, i64 rows,
                         i64 width, Rows<T> out, Rows<T> total) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      add_row(x[row], residual[row], width, total[row]);
      norm_row<T>(total[row], weight, norm, width, out[row]);
    }
  });
}

}  // namespace inferc
