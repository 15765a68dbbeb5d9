// One pass over the votes of a capsule layer, forward or backward, without storing them.
//
// The vectorised axis is not one of the capsules but images and output positions: a lane is one (image, position) pair.
// Every step of a routing is then the same for all lanes, for any number of children, parents or dimensions: dot
// products, softmax and sums need no shuffles, and elements of transformation matrices are broadcast to a register.
// Votes live in registers, a few at a time, and are recomputed if they are needed again, which is cheaper than writing
// them even to the first-level cache.
//
// A block of slots is processed together for each parent, so that the data of a parent is loaded once per block.
//
// Letters are those of torchcaps.capsules. Panels are [rows][lanes]: the input of a slot [A * X], parents [J * D] with
// d = a * Y + y, couplings [J].

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace {

// Size and number of the vector registers. Wider vectors would be split by the compiler, and values that do not fit into
// the registers would be spilled to memory: slower than the arithmetic, and much slower to compile.
#if defined(__AVX512F__)
constexpr int BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int BYTES = 16, REGISTERS = 32;
#else
constexpr int BYTES = 16, REGISTERS = 16;
#endif
constexpr int TILE = REGISTERS / 2;  // accumulators; the other registers contain operands

template <class T, int Size = BYTES / sizeof(T)>
struct Vector {
  static constexpr int N = Size;
  typedef T Type __attribute__((vector_size(Size * sizeof(T)), aligned(Size * sizeof(T)), may_alias));
};

typedef int32_t Ints __attribute__((vector_size(BYTES)));
typedef Vector<float>::Type Floats;
typedef Vector<double>::Type Doubles;

inline Floats exp_of(Floats x) {  // Cephes' expf: 2^n times a polynomial, accurate to 1 or 2 ulp
  const Floats low = Floats{} - 87.0f, magic = Floats{} + 12582912.0f;
  x = x < low ? low : x;
  const Floats n = (x * 1.44269504088896341f + magic) - magic;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

inline Doubles exp_of(Doubles x) {
  for (int lane = 0; lane < Vector<double>::N; ++lane) x[lane] = std::exp(x[lane]);
  return x;
}

// Return the sums over the lanes of N vectors as one vector: halves of pairs are joined and added, then quarters, and so
// on. Sum k is in lane k.
template <class V, int Half, size_t... L>
inline V folded(V a, V b, std::index_sequence<L...>) {
  constexpr int N = sizeof...(L);
  return __builtin_shufflevector(a, b, (L % (2 * Half) < Half ? L : N + L - Half)...) +
         __builtin_shufflevector(a, b, (L % (2 * Half) < Half ? L + Half : N + L)...);
}

// Two registers as one of twice the size.
template <class V, size_t... L>
inline auto concatenated(V a, V b, std::index_sequence<L...>) {
  return __builtin_shufflevector(a, b, L...);
}

// Exchange the second half of each 2 * Half values of `a` with the first one of `b`; return the new `a` (0) or `b` (1).
template <class V, int Half, int Which, size_t... L>
inline V exchanged(V a, V b, std::index_sequence<L...>) {
  constexpr int N = sizeof...(L);
  if constexpr (Which == 0) return __builtin_shufflevector(a, b, (L & Half ? N + L - Half : L)...);
  else return __builtin_shufflevector(a, b, (L & Half ? N + L : L + Half)...);
}

template <class V, int N, int Half = N / 2>
inline V sums_over_lanes(V* rows) {
  for (int k = 0; k < Half; ++k) rows[k] = folded<V, Half>(rows[k], rows[k + Half], std::make_index_sequence<N>());
  if constexpr (Half > 1) return sums_over_lanes<V, N, Half / 2>(rows);
  else return rows[0];
}

}  // namespace

extern "C" {

enum Kind : int64_t { SUM, DOT, SQSUM, SQDIST, ATTEND, FIT, CHOOSE, RESEMBLE };
enum Similarity : int64_t { COSINE, TANIMOTO, PEARSON };

// Arguments of a pass; torchcaps/votes/cpu/kernel.py has the same fields in the same order.
struct Pass {
  int64_t kind, leak, through;          // leak: add a competitor without parent; through: gradients of couplings
  int64_t lanes, slots, types, cells;   // lanes: images times output positions
  int64_t rows, columns, parents, outs;  // A, X of one child, J, Y
  int64_t by_type;                      // whether a slot reads its whole window
  int64_t sites[2], grid[2], kernel[2], stride[2], before[2];
  int64_t steps[4];                     // strides of image, row, column and type of the children
  int64_t chunk;                        // lanes per chunk
  int64_t begin, end;                   // forward: lanes; backward: child types
  const void *pose, *weight, *bias;     // children, [I, X, J, Y], [I, J, D] or null
  const void *pairs, *first, *second;   // [lanes, I, J]; [lanes, J, D] twice: coupling; query or mean; scale
  void* result;                         // forward
  const void* gradient;                 // of the result
  void *pose_grad, *weight_grad, *bias_grad;  // accumulated into
  void *pairs_grad, *first_grad, *second_grad;
  // FIT, both steps of EM: couplings softmax_j(constant - Σ_d second (v - first)²), uniform without a constant, times the
  // child's activation. Sums per parent: mass of the couplings, result (of votes), squares (of deviations from the mean).
  const void *activation, *constant;  // of each child, or null for 1; [lanes, J]
  void *mass, *squares;               // forward: [lanes, J], [lanes, J, D]
  const void *mass_gradient, *squares_gradient, *center;  // center: the mean, [lanes, J, D]
  void *activation_grad, *constant_grad;
  // `shared` is [I, J]. FIT: factors of the couplings in another sum per parent, `score`. ATTEND: added to the couplings.
  // CHOOSE, self-routing: couplings are softmax_j of a linear function of the child with weights `classifier`,
  // [I, A * X, J], and offsets `shared`, times its activation; sums per parent: mass, and result (of votes).
  // RESEMBLE: ATTEND with a similarity of `first` and the vote; `constant` is the squared length of `first` (TANIMOTO).
  int64_t similarity;
  double least;                       // smallest squared length or divisor
  const void *shared, *classifier;
  void* score;                        // [lanes, J]
  const void* score_gradient;
  void *shared_grad, *classifier_grad;
};

}  // extern "C"

namespace {

constexpr int BLOCK = 4;  // slots that are processed together

template <class T>
class Runner {
  using V = typename Vector<T>::Type;
  static constexpr int N = Vector<T>::N;
  template <int R>
  using Size = std::integral_constant<int, R>;
  template <int TA, int TY, int TB>
  using Tile = V[TA][TY][TB];  // rows, columns, vectors of lanes
  template <int TA, int TY, int TB>
  struct Shape {};

 public:
  explicit Runner(const Pass& pass)
      : p(pass),
        A(p.rows),
        X(p.columns * (p.by_type ? p.cells : 1)),
        J(p.parents),
        Y(p.outs),
        D(A * Y),
        nb(p.chunk / N) {
    const int64_t nb = p.chunk / N;
    positions.resize(p.cells * p.chunk);
    const int64_t more = p.kind >= FIT ? 3 * J * D + 4 * J + 2 * BLOCK + 3 * BLOCK * J : 0;
    const int64_t rows = 2 * BLOCK * A * X + 4 * J * D + D + 3 * BLOCK * J + more;
    memory = static_cast<V*>(std::aligned_alloc(64, sizeof(V) * rows * nb));
    V* next = memory;
    auto take = [&](int64_t n) { V* own = next; next += n * nb; return own; };
    for (int k = 0; k < BLOCK; ++k) {
      u[k] = take(A * X), du[k] = take(A * X);
      c[k] = take(J), l[k] = take(J), dc[k] = take(J);
    }
    first = take(J * D), second = take(J * D), sum = take(J * D), other = take(J * D), dv = take(D);
    if (p.kind < FIT) return;
    for (k = 0; k < BLOCK; ++k) act[k] = take(1), dact[k] = take(1);
    of_total = take(J * D), of_squares = take(J * D), center = take(J * D);
    constant = take(J), mass = take(J), dconstant = take(J), score = take(J);
    for (k = 0; k < BLOCK; ++k) square[k] = take(J), plain[k] = take(J), logit[k] = take(J);
  }
  ~Runner() { std::free(memory); }
  Runner(const Runner&) = delete;

  void forward() {
    for (start = p.begin; start < p.end; start += p.chunk) {
      enter(p.end);
      for (slot = 0; slot < p.slots; slot += n) {
        n = std::min<int64_t>(BLOCK, p.slots - slot);
        for (k = 0; k < n; ++k) read();
        reduce();
      }
      if (p.kind == FIT) store_fit();
      else if (p.kind == CHOOSE) store_chosen();
      else if (of_parents()) store_parents(sum, static_cast<T*>(p.result), J * D, false);
    }
  }

  void backward() {
    const int64_t cells = p.by_type ? 1 : p.cells;
    for (start = 0; start < p.lanes; start += p.chunk) {
      enter(p.lanes);
      for (int64_t cell = 0; cell < cells; ++cell)
        for (int64_t type = p.begin; type < p.end; type += n) {
          slot = cell * p.types + type;
          n = std::min<int64_t>(BLOCK, p.end - type);
          for (k = 0; k < n; ++k) {
            read();
            std::memset(static_cast<void*>(du[k]), 0, sizeof(V) * A * X * nb);
          }
          if (p.kind == FIT) differentiate_fit();
          else if (p.kind == CHOOSE) differentiate_chosen();
          else if (p.kind == RESEMBLE) differentiate_similarity();
          else differentiate();
          for (k = 0; k < n; ++k) write_back();
        }
      if (p.first_grad) store_parents(sum, static_cast<T*>(p.first_grad), J * D, true);
      if (p.second_grad) store_parents(other, static_cast<T*>(p.second_grad), J * D, true);
      if (p.constant_grad) store_parents(dconstant, static_cast<T*>(p.constant_grad), J, true);
    }
  }

 private:
  bool of_parents() const { return p.kind != DOT && p.kind != SQDIST; }

  // The gradient of a per-parent result uses the buffer of the second argument, which these reductions do not have.
  V* result_gradient() const { return second; }

  // Once per chunk: the window positions of each lane, and the parents' panels.
  void enter(int64_t end) {
    used = std::min(p.chunk, end - start);
    nb = (used + N - 1) / N;
    const int64_t n_sites = p.sites[0] * p.sites[1];
    for (int64_t cell = 0; cell < p.cells; ++cell)
      for (int64_t lane = 0; lane < nb * N; ++lane) {
        const int64_t image = (start + lane) / n_sites, site = (start + lane) % n_sites;
        const int64_t row = site / p.sites[1] * p.stride[0] - p.before[0] + cell / p.kernel[1];
        const int64_t column = site % p.sites[1] * p.stride[1] - p.before[1] + cell % p.kernel[1];
        const bool inside = lane < used && row >= 0 && row < p.grid[0] && column >= 0 && column < p.grid[1];
        positions[cell * p.chunk + lane] =
            inside ? image * p.steps[0] + row * p.steps[1] + column * p.steps[2] : int64_t(-1);
      }
    if (p.first) load_parents(first, static_cast<const T*>(p.first), J * D);
    if (p.second) load_parents(second, static_cast<const T*>(p.second), J * D);
    if (p.kind == FIT) {
      if (p.constant) load_parents(constant, static_cast<const T*>(p.constant), J);
      if (p.gradient) {
        load_parents(of_total, static_cast<const T*>(p.gradient), J * D);
        load_parents(of_squares, static_cast<const T*>(p.squares_gradient), J * D);
        load_parents(center, static_cast<const T*>(p.center), J * D);
        load_parents(mass, static_cast<const T*>(p.mass_gradient), J);
      } else {
        std::memset(static_cast<void*>(mass), 0, sizeof(V) * J * nb);
      }
      std::memset(static_cast<void*>(dconstant), 0, sizeof(V) * J * nb);
    } else if (p.gradient && of_parents()) {
      load_parents(result_gradient(), static_cast<const T*>(p.gradient), J * D);
    }
    if (p.kind >= FIT) enter_routing();
    std::memset(static_cast<void*>(sum), 0, sizeof(V) * J * D * nb);
    std::memset(static_cast<void*>(other), 0, sizeof(V) * J * D * nb);
  }

  // Computation of each pass ----------------------------------------------------------------------------
  //
  // Functions of tiles copy the pointers they use: the compiler would have to reload members of `this` after every
  // store.

  void reduce() {
    switch (p.kind) {
      case DOT:
      case ATTEND:
        agree(first, l);
        break;
      case SQDIST:
        measure();
        break;
      case SUM:
      case SQSUM:
        for (k = 0; k < n; ++k) load_pairs(c[k], static_cast<const T*>(p.pairs));
        break;
      case FIT:
        fit();
        return;
      case CHOOSE:
        choose();
        return;
      case RESEMBLE:
        resemble();
        return;
      default:
        break;
    }
    if (p.kind == DOT || p.kind == SQDIST) {
      for (k = 0; k < n; ++k) store_pairs(l[k], static_cast<T*>(p.result));
    } else if (p.kind == SQSUM) {
      visit([&](int64_t offset) {
        return [=, mean = first + offset, to = sum + offset, own = c[k] + parent * nb, Y = Y, nb = nb](auto& vote, int64_t b) {
          each_vote(vote, [&](int64_t row, int w, V v) {
            const V apart = v - mean[row * nb + b + w];
            to[row * nb + b + w] += own[b + w] * apart * apart;
          }, Y);
        };
      });
    } else {
      if (p.kind == ATTEND) softmax(), add_shared();
      accumulate(c, sum);
    }
  }

  // Gradients of the votes, parent by parent, and of the arguments, given the gradient of the result.
  void differentiate() {
    const V* G = result_gradient();
    const bool of_result = p.kind == SUM || p.kind == SQSUM;
    if (p.kind != ATTEND)  // c: the coupling, or the gradient of a result per slot and parent
      for (k = 0; k < n; ++k) load_pairs(c[k], static_cast<const T*>(of_result ? p.pairs : p.gradient));
    switch (p.kind) {
      case SUM:
        if (p.pairs_grad) agree(G, dc);
        push_products(c, G);
        break;
      case DOT:
        if (p.first_grad) accumulate(c, sum);
        push_products(c, first);
        break;
      case SQSUM:
        clear(dc);
        visit([&](int64_t offset) {
          return [=, mean = first + offset, g = G + offset, own = c[k] + parent * nb, of_own = dc[k] + parent * nb,
                  of_mean = sum + offset, slope = dv + offset - parent * D * nb, Y = Y, nb = nb](auto& vote, int64_t b) {
            sum_votes(vote, of_own + b, [&](int64_t row, int w, V v) {
              const int64_t at = row * nb + b + w;
              const V apart = v - mean[at], pull = g[at] * apart, of_vote = T(2) * own[b + w] * pull;
              of_mean[at] -= of_vote;
              slope[at] = of_vote;
              return pull * apart;
            }, Y);
          };
        }, true);
        break;
      case SQDIST:
        visit([&](int64_t offset) {
          return [=, mean = first + offset, scale = second + offset, own = c[k] + parent * nb, of_mean = sum + offset,
                  of_scale = other + offset, slope = dv + offset - parent * D * nb, Y = Y, nb = nb](auto& vote, int64_t b) {
            each_vote(vote, [&](int64_t row, int w, V v) {
              const int64_t at = row * nb + b + w;
              const V apart = v - mean[at], of_vote = T(2) * own[b + w] * scale[at] * apart;
              of_scale[at] += own[b + w] * apart * apart;
              of_mean[at] -= of_vote;
              slope[at] = of_vote;
            }, Y);
          };
        }, true);
        break;
      case ATTEND:
        if (!p.through) {
          agree(first, l);
          softmax();
          push_products(c, G);
          break;
        }
        clear(l), clear(dc);
        visit([&](int64_t offset) {
          return [=, query = first + offset, g = G + offset, to = l[k] + parent * nb, more = dc[k] + parent * nb, Y = Y,
                  nb = nb](auto& vote, int64_t b) {
            sum_votes(vote, to + b, [&](int64_t row, int w, V v) { return query[row * nb + b + w] * v; }, Y);
            sum_votes(vote, more + b, [&](int64_t row, int w, V v) { return g[row * nb + b + w] * v; }, Y);
          };
        });
        softmax();
        for (k = 0; k < n; ++k) through_softmax(c[k], dc[k], l[k], J, nb);
        for (k = 0; k < n; ++k) add_shared_gradient(dc[k]);
        add_shared();
        accumulate(l, sum);
        push_products(c, G, l, first);
        break;
    }
    if (of_result && p.pairs_grad)
      for (k = 0; k < n; ++k) store_pairs(dc[k], static_cast<T*>(p.pairs_grad));
  }

  // l = Σ_d scale (v - mean)²
  void measure() {
    clear(l);
    visit([&](int64_t offset) {
      const V *mean = first + offset, *scale = second + offset;
      return [=, to = l[k] + parent * nb, Y = Y, nb = nb](auto& vote, int64_t b) {
        sum_votes(vote, to + b, [&](int64_t row, int w, V own) {
          const V apart = own - mean[row * nb + b + w];
          return scale[row * nb + b + w] * apart * apart;
        }, Y);
      };
    });
  }

  // Both steps of EM ----------------------------------------------------------------------------------------------

  // Couplings c of the block, and the activations of its children.
  void assign() {
    for (k = 0; k < n; ++k) {
      load_activations();
      if (p.constant) {
        for (int64_t at = 0; at < J * nb; ++at) l[k][at] = constant[at] - l[k][at];
        softmax_of(l[k], c[k], J, nb, false);
      } else {
        for (int64_t at = 0; at < J * nb; ++at) c[k][at] = V{} + T(1) / T(J);
      }
    }
  }

  // Mean and squares are updated slot by slot (West 1979): a difference of two large sums would lose the variance.
  void fit() {
    if (p.constant) measure();
    assign();
    for (k = 0; k < n; ++k) {
      weigh(c[k], l[k], dc[k], act[k], mass, J, nb);
      add_score();
    }
    visit_pairs(sum, other, l, dc, [](V v, V part, V rest, V& mean, V& squares) {
      const V apart = v - mean;
      mean += part * apart;
      squares += rest * apart * apart;
    });
  }

  // The coupling's part of the mass so far, and the factor of the squared deviation from the mean so far.
  static void weigh(const V* c, V* part, V* rest, const V* act, V* mass, int64_t J, int64_t nb) {
    for (int64_t j = 0; j < J; ++j, c += nb, part += nb, rest += nb, mass += nb)
      for (int64_t b = 0; b < nb; ++b) {
        const V own = c[b] * act[b], total = mass[b] + own;
        mass[b] = total;
        part[b] = own / (total > T(0) ? total : V{} + T(1));
        rest[b] = own - own * part[b];
      }
  }

  void store_fit() {
    store_parents(mass, static_cast<T*>(p.mass), J, false);
    if (p.score) store_parents(score, static_cast<T*>(p.score), J, false);
    store_parents(other, static_cast<T*>(p.squares), J * D, false);
    for (int64_t j = 0; j < J; ++j)
      for (int64_t d = 0; d < D; ++d)
        for (int64_t b = 0; b < nb; ++b) sum[(j * D + d) * nb + b] *= mass[j * nb + b];
    store_parents(sum, static_cast<T*>(p.result), J * D, false);
  }

  // Given the gradients of mass, sum and squares. `dc` accumulates those of the couplings times activations.
  void differentiate_fit() {
    clear(dc);
    if (!p.constant) {
      assign();
      for (k = 0; k < n; ++k) scale(c[k], act[k]);
      visit([&](int64_t offset) {
        return [=, g = of_total + offset, g2 = of_squares + offset, mean = center + offset, own = c[k] + parent * nb,
                to = dc[k] + parent * nb, slope = dv + offset - parent * D * nb, Y = Y, nb = nb](auto& vote, int64_t b) {
          sum_votes(vote, to + b, [&](int64_t row, int w, V v) {
            const int64_t at = row * nb + b + w;
            const V pull = g2[at] * (v - mean[at]);
            slope[at] = own[b + w] * (g[at] + T(2) * pull);
            return g[at] * v + pull * (v - mean[at]);
          }, Y);
        };
      }, true);
      for (k = 0; k < n; ++k) {
        through_score();
        for (int64_t b = 0; b < nb; ++b) {
          V total{};
          for (int64_t j = 0; j < J; ++j) total += dc[k][j * nb + b] + mass[j * nb + b];
          dact[k][b] = total * (T(1) / T(J));
        }
        if (p.activation_grad) add_activation_gradients();
        add_shared_score_gradient();
      }
      return;
    }
    clear(l);
    visit([&](int64_t offset) {
      return [=, mean = first + offset, scale = second + offset, g = of_total + offset, g2 = of_squares + offset,
              center = center + offset, to = l[k] + parent * nb, more = dc[k] + parent * nb, Y = Y,
              nb = nb](auto& vote, int64_t b) {
        sum_votes(vote, to + b, [&](int64_t row, int w, V v) {
          const V apart = v - mean[row * nb + b + w];
          return scale[row * nb + b + w] * apart * apart;
        }, Y);
        sum_votes(vote, more + b, [&](int64_t row, int w, V v) {
          const V apart = v - center[row * nb + b + w];
          return g[row * nb + b + w] * v + g2[row * nb + b + w] * apart * apart;
        }, Y);
      };
    });
    assign();
    for (k = 0; k < n; ++k) {
      through_score();
      through_assignment(c[k], dc[k], l[k], act[k], dact[k], mass, dconstant, J, nb);
      add_shared_score_gradient();
      if (p.activation_grad) add_activation_gradients();
    }
    visit([&](int64_t offset) {
      return [=, mean = first + offset, scale = second + offset, g = of_total + offset, g2 = of_squares + offset,
              center = center + offset, own = c[k] + parent * nb, pull = l[k] + parent * nb, of_mean = sum + offset,
              of_scale = other + offset, slope = dv + offset - parent * D * nb, Y = Y, nb = nb](auto& vote, int64_t b) {
        each_vote(vote, [&](int64_t row, int w, V v) {
          const int64_t at = row * nb + b + w;
          const V apart = v - mean[at], near = pull[b + w] * apart, of_distance = T(2) * near * scale[at];
          of_mean[at] += of_distance;
          of_scale[at] -= near * apart;
          slope[at] = own[b + w] * (g[at] + T(2) * g2[at] * (v - center[at])) - of_distance;
        }, Y);
      };
    }, true);
  }

  // c: couplings, replaced by couplings times activations; dc: gradient of that; dl: gradient of the logits.
  static void through_assignment(V* c, const V* dc, V* dl, const V* act, V* dact, const V* of_mass, V* dconstant,
                                 int64_t J, int64_t nb) {
    for (int64_t b = 0; b < nb; ++b) {
      V mean{};
      for (int64_t j = 0; j < J; ++j) mean += c[j * nb + b] * (dc[j * nb + b] + of_mass[j * nb + b]);
      dact[b] = mean;
      for (int64_t j = 0; j < J; ++j) {
        const int64_t at = j * nb + b;
        const V own = c[at] * act[b];
        dl[at] = own * (dc[at] + of_mass[at] - mean);
        dconstant[at] += dl[at];
        c[at] = own;
      }
    }
  }

  void scale(V* panel, const V* factor) const {
    for (int64_t j = 0; j < J; ++j)
      for (int64_t b = 0; b < nb; ++b) panel[j * nb + b] *= factor[b];
  }

  // Activation of each lane's child: 1 without activations, 0 for padding.
  void load_activations() {
    T* panel = reinterpret_cast<T*>(act[k]);
    std::memset(static_cast<void*>(act[k]), 0, sizeof(V) * nb);
    each_child([&](int64_t child, int64_t lane) {
      panel[lane] = p.activation ? static_cast<const T*>(p.activation)[child] : T(1);
    });
  }

  void add_activation_gradients() {
    const T* panel = reinterpret_cast<const T*>(dact[k]);
    T* to = static_cast<T*>(p.activation_grad);
    each_child([&](int64_t child, int64_t lane) { to[child] += panel[lane]; });
  }

  // Call a function with the index of the child and the lane, outside of padding.
  template <class F>
  void each_child(F function) const {
    const int64_t* own = &positions[(slot + k) / p.types * p.chunk];
    for (int64_t lane = 0; lane < used; ++lane)
      if (own[lane] >= 0) function(own[lane] / p.steps[3] + (slot + k) % p.types, lane);
  }

  // Constants per slot and parent -----------------------------------------------------------------------------------

  void enter_routing() {
    if (p.kind != FIT) {
      if (p.constant) load_parents(constant, static_cast<const T*>(p.constant), J);
      if (p.mass_gradient) load_parents(mass, static_cast<const T*>(p.mass_gradient), J);
      else std::memset(static_cast<void*>(mass), 0, sizeof(V) * J * nb);
      std::memset(static_cast<void*>(dconstant), 0, sizeof(V) * J * nb);
    }
    if (p.score_gradient) load_parents(score, static_cast<const T*>(p.score_gradient), J);
    else std::memset(static_cast<void*>(score), 0, sizeof(V) * J * nb);
  }

  const T* shared() const { return static_cast<const T*>(p.shared) + (slot + k) * J; }

  void add_shared() {  // to the couplings
    for (k = 0; k < n && p.shared; ++k)
      for (int64_t j = 0; j < J; ++j)
        for (int64_t b = 0; b < nb; ++b) c[k][j * nb + b] += shared()[j];
  }

  void add_shared_gradient(const V* from) const {
    if (!p.shared_grad) return;
    T* to = static_cast<T*>(p.shared_grad) + (slot + k) * J;
    for (int64_t j = 0; j < J; ++j) {
      V total{};
      for (int64_t b = 0; b < nb; ++b) total += from[j * nb + b];
      for (int lane = 0; lane < N; ++lane) to[j] += total[lane];
    }
  }

  void add_score() {
    for (int64_t j = 0; j < J && p.shared; ++j)
      for (int64_t b = 0; b < nb; ++b) score[j * nb + b] += shared()[j] * c[k][j * nb + b] * act[k][b];
  }

  void through_score() {  // to the gradient of the couplings times activations
    for (int64_t j = 0; j < J && p.shared; ++j)
      for (int64_t b = 0; b < nb; ++b) dc[k][j * nb + b] += shared()[j] * score[j * nb + b];
  }

  void add_shared_score_gradient() {  // c: couplings times activations
    if (!p.shared_grad) return;
    for (int64_t at = 0; at < J * nb; ++at) dc[k][at] = c[k][at] * score[at];
    add_shared_gradient(dc[k]);
  }

  // Self-routing ----------------------------------------------------------------------------------------------------

  // Couplings times activations; with `gradient`, they are not multiplied yet.
  void classify(bool gradient) {
    for (k = 0; k < n; ++k) {
      const T* weights = static_cast<const T*>(p.classifier) + (slot + k) * A * X * J;
      int64_t j = 0;
      for (; j + 4 <= J; j += 4) linear<4>(u[k], weights + j, shared() + j, l[k] + j * nb, A * X, J, nb);
      for (; j < J; ++j) linear<1>(u[k], weights + j, shared() + j, l[k] + j * nb, A * X, J, nb);
      softmax_of(l[k], c[k], J, nb, false);
      load_activations();
      if (!gradient) scale(c[k], act[k]);
    }
  }

  template <int W>
  static void linear(const V* u, const T* weights, const T* offsets, V* to, int64_t rows, int64_t J, int64_t nb) {
    for (int64_t b = 0; b < nb; ++b) {
      V total[W];
      for (int w = 0; w < W; ++w) total[w] = V{} + offsets[w];
      for (int64_t row = 0; row < rows; ++row)
        for (int w = 0; w < W; ++w) total[w] += u[row * nb + b] * weights[row * J + w];
      for (int w = 0; w < W; ++w) to[w * nb + b] = total[w];
    }
  }

  void choose() {
    classify(false);
    for (k = 0; k < n; ++k)
      for (int64_t at = 0; at < J * nb; ++at) mass[at] += c[k][at];
    accumulate(c, sum);
  }

  void store_chosen() {
    store_parents(mass, static_cast<T*>(p.mass), J, false);
    store_parents(sum, static_cast<T*>(p.result), J * D, false);
  }

  void differentiate_chosen() {
    const V* G = result_gradient();
    classify(true);
    agree(G, dc);
    for (k = 0; k < n; ++k) {
      through_assignment(c[k], dc[k], l[k], act[k], dact[k], mass, dconstant, J, nb);
      if (p.activation_grad) add_activation_gradients();
    }
    push_products(c, G);
    for (k = 0; k < n; ++k) {
      add_shared_gradient(l[k]);
      const T* weights = static_cast<const T*>(p.classifier) + (slot + k) * A * X * J;
      T* to = p.classifier_grad ? static_cast<T*>(p.classifier_grad) + (slot + k) * A * X * J : nullptr;
      int64_t row = 0;
      for (; row + 4 <= A * X; row += 4) classifier_rows<4>(row, weights, to);
      for (; row < A * X; ++row) classifier_rows<1>(row, weights, to);
    }
  }

  template <int H>
  void classifier_rows(int64_t row, const T* weights, T* to) {
    constexpr int W = std::max(1, N / H);
    int64_t j = 0;
    for (; to && j + W <= J; j += W) weight_tile<H, W>(to + row * J + j, u[k] + row * nb, l[k] + j * nb, 1, 0, 0, J, nb);
    for (; to && j < J; ++j) weight_tile<H, 1>(to + row * J + j, u[k] + row * nb, l[k] + j * nb, 1, 0, 0, J, nb);
    if (p.pose_grad) slot_rows<H>(du[k] + row * nb, l[k], weights + row * J, J, J, nb);
  }

  // Attention by a similarity ---------------------------------------------------------------------------------------

  // l: product with the query, square: squared length, plain: sum of the components, dc: product with the gradient.
  void compare(bool gradient) {
    clear(l), clear(square), clear(plain), clear(dc);
    const bool centered = p.similarity == PEARSON;
    visit([&](int64_t offset) {
      return [=, query = first + offset, g = result_gradient() + offset, to = l[k] + parent * nb,
              squares = square[k] + parent * nb, sums = plain[k] + parent * nb, more = dc[k] + parent * nb, Y = Y,
              nb = nb](auto& vote, int64_t b) {
        sum_votes(vote, to + b, [&](int64_t row, int w, V v) { return query[row * nb + b + w] * v; }, Y);
        sum_votes(vote, squares + b, [&](int64_t, int, V v) { return v * v; }, Y);
        if (centered) sum_votes(vote, sums + b, [&](int64_t, int, V v) { return v; }, Y);
        if (gradient) sum_votes(vote, more + b, [&](int64_t row, int w, V v) { return g[row * nb + b + w] * v; }, Y);
      };
    });
    const V least = V{} + T(p.least);
    for (k = 0; k < n; ++k) {
      for (int64_t at = 0; at < J * nb; ++at) {
        V size = square[k][at];
        if (centered) size -= plain[k][at] * plain[k][at] * (T(1) / T(D));
        if (p.similarity == TANIMOTO) size += constant[at] - l[k][at];
        size = size > least ? size : least;
        square[k][at] = p.similarity == TANIMOTO ? T(1) / size : inverse_root(size);
        logit[k][at] = l[k][at] * square[k][at];
      }
      softmax_of(logit[k], c[k], J, nb, false);
    }
  }

  static V inverse_root(V x) {
    for (int lane = 0; lane < N; ++lane) x[lane] = T(1) / std::sqrt(x[lane]);
    return x;
  }

  void resemble() {
    compare(false);
    accumulate(c, sum);
  }

  void differentiate_similarity() {
    compare(true);
    const bool centered = p.similarity == PEARSON;
    const T limit = p.similarity == TANIMOTO ? T(1) / T(p.least) : T(1) / std::sqrt(T(p.least));
    for (k = 0; k < n; ++k) {
      through_softmax(c[k], dc[k], logit[k], J, nb);
      for (int64_t at = 0; at < J * nb; ++at) {
        const V inverse = square[k][at], dl = logit[k][at], of_product = dl * inverse;
        // the gradient of the divisor, or half of that of the squared length; 0 at the least one
        V size = of_product * l[k][at] * inverse * (p.similarity == TANIMOTO ? V{} + T(1) : inverse);
        size = inverse < limit ? size : V{};
        if (p.similarity == TANIMOTO) {
          l[k][at] = of_product + size;
          dconstant[at] -= size;
          square[k][at] = T(-2) * size;
        } else {
          l[k][at] = of_product;
          square[k][at] = -size;
          plain[k][at] *= centered ? size * (T(1) / T(D)) : V{};
        }
      }
    }
    const V* G = result_gradient();
    visit([&](int64_t offset) {
      return [=, query = first + offset, g = G + offset, own = c[k] + parent * nb, slope = l[k] + parent * nb,
              stretch = square[k] + parent * nb, shift = plain[k] + parent * nb, of_query = sum + offset,
              of_vote = dv + offset - parent * D * nb, Y = Y, nb = nb](auto& vote, int64_t b) {
        each_vote(vote, [&](int64_t row, int w, V v) {
          const int64_t at = row * nb + b + w;
          of_query[at] += slope[b + w] * v;
          of_vote[at] = own[b + w] * g[at] + slope[b + w] * query[at] + stretch[b + w] * v + shift[b + w];
        }, Y);
      };
    }, true);
  }

  void clear(V* const* panels) {
    for (k = 0; k < n; ++k) std::memset(static_cast<void*>(panels[k]), 0, sizeof(V) * J * nb);
  }

  // Σ_d x v, one value per parent.
  void agree(const V* with, V* const* to) {
    clear(to);
    visit([&](int64_t offset) {
      return [=, x = with + offset, sums = to[k] + parent * nb, Y = Y, nb = nb](auto& vote, int64_t b) {
        sum_votes(vote, sums + b, [&](int64_t row, int w, V v) { return x[row * nb + b + w] * v; }, Y);
      };
    });
  }

  // Add all votes, weighted by the coefficient of slot and parent, to a panel of parents. A tile of the panel stays in
  // registers for all slots of the block.
  void accumulate(V* const* coefficients, V* to) {
    for (parent = 0; parent < J; ++parent)
      each_tile([&](int64_t a, int64_t y, auto shape) {
        const V *inputs[BLOCK], *own[BLOCK];
        for (int64_t of = 0; of < n; ++of)
          inputs[of] = u[of] + a * X * nb, own[of] = coefficients[of] + parent * nb;
        const T* weight = static_cast<const T*>(p.weight) + slot * X * J * Y + parent * Y + y;
        const T* bias = p.bias ? static_cast<const T*>(p.bias) + (slot * J + parent) * D + a * Y + y : nullptr;
        with_columns(shape, [&](auto x_size) {
          sum_tile<decltype(x_size)::value>(shape, inputs, own, weight, bias, to + (parent * D + a * Y + y) * nb, n, X,
                                            J * Y, J * D, Y, nb);
        });
      });
  }

  // Update two panels of parents with all votes: function(vote, left and right value of slot and parent, values of the
  // panels). Tiles of both panels stay in registers for all slots of the block.
  template <class F>
  void visit_pairs(V* one, V* two, V* const* left, V* const* right, F function) {
    for (parent = 0; parent < J; ++parent)
      each_tile([&](int64_t a, int64_t y, auto shape) {
        const V *inputs[BLOCK], *lefts[BLOCK], *rights[BLOCK];
        for (int64_t of = 0; of < n; ++of)
          inputs[of] = u[of] + a * X * nb, lefts[of] = left[of] + parent * nb, rights[of] = right[of] + parent * nb;
        const T* weight = static_cast<const T*>(p.weight) + slot * X * J * Y + parent * Y + y;
        const T* bias = p.bias ? static_cast<const T*>(p.bias) + (slot * J + parent) * D + a * Y + y : nullptr;
        const int64_t at = (parent * D + a * Y + y) * nb;
        with_columns(shape, [&](auto x_size) {
          pair_tile<decltype(x_size)::value>(shape, inputs, lefts, rights, weight, bias, one + at, two + at, n, X, J * Y,
                                             J * D, Y, nb, function);
        });
      });
  }

  template <int XS, int TA, int TY, int TB, class F>
  __attribute__((noinline)) static void pair_tile(Shape<TA, TY, TB>, const V* const* u, const V* const* left,
                                                  const V* const* right, const T* weight, const T* bias, V* one, V* two,
                                                  int64_t n, int64_t X, int64_t step, int64_t bias_step, int64_t Y,
                                                  int64_t nb, F function) {
    constexpr int HY = TY > 1 ? TY / 2 : 1;  // three values per vote are in registers
    if (XS) X = XS;
    for (int y = 0; y < TY; y += HY)
      for (int64_t b = 0; b < nb; ++b) {
        V first[TA][HY], second[TA][HY];
        for (int h = 0; h < TA; ++h)
          for (int i = 0; i < HY; ++i) {
            const int64_t at = (h * Y + y + i) * nb + b;
            first[h][i] = one[at], second[h][i] = two[at];
          }
        const T* factor = weight + y;
        for (int64_t k = 0; k < n; ++k) {
          const V* from = u[k] + b;
          V vote[TA][HY];
          for (int h = 0; h < TA; ++h)
            for (int i = 0; i < HY; ++i) vote[h][i] = V{} + (bias ? bias[k * bias_step + h * Y + y + i] : T(0));
#pragma GCC unroll 8
          for (int64_t x = 0; x < (XS ? XS : X); ++x, from += nb, factor += step)
            for (int h = 0; h < TA; ++h)
              for (int i = 0; i < HY; ++i) vote[h][i] += from[h * X * nb] * factor[i];
          const V l = left[k][b], r = right[k][b];
          for (int h = 0; h < TA; ++h)
            for (int i = 0; i < HY; ++i)
              function(vote[h][i], l, r, first[h][i], second[h][i]);
        }
        for (int h = 0; h < TA; ++h)
          for (int i = 0; i < HY; ++i) {
            const int64_t at = (h * Y + y + i) * nb + b;
            one[at] = first[h][i], two[at] = second[h][i];
          }
      }
  }

  // to += Σ c (Σ_x u[a][x] W[x][y] + bias[a][y]) over the slots.
  template <int XS, int TA, int TY, int TB>
  __attribute__((noinline)) static void sum_tile(Shape<TA, TY, TB>, const V* const* u, const V* const* c,
                                                 const T* weight, const T* bias, V* to, int64_t n, int64_t X,
                                                 int64_t step, int64_t bias_step, int64_t Y, int64_t nb) {
    int64_t b = 0;
    for (; b + TB <= nb; b += TB) sum_lanes<TA, TY, TB, XS>(u, c, weight, bias, to, n, X, step, bias_step, Y, nb, b);
    if constexpr (TB > 1)
      for (; b < nb; ++b) sum_lanes<TA, TY, 1, XS>(u, c, weight, bias, to, n, X, step, bias_step, Y, nb, b);
  }

  template <int TA, int TY, int TB, int XS>
  static inline __attribute__((always_inline)) void sum_lanes(const V* const* u, const V* const* c, const T* weight,
                                                              const T* bias, V* to, int64_t n, int64_t X, int64_t step,
                                                              int64_t bias_step, int64_t Y, int64_t nb, int64_t b) {
    if (XS) X = XS;
    Tile<TA, TY, TB> sum;
    for (int h = 0; h < TA; ++h)
      for (int i = 0; i < TY; ++i)
        for (int w = 0; w < TB; ++w) sum[h][i][w] = to[(h * Y + i) * nb + b + w];
    for (int64_t k = 0; k < n; ++k) {
      const V* from = u[k] + b;
      V own[TB];
      for (int w = 0; w < TB; ++w) own[w] = c[k][b + w];
#pragma GCC unroll 8
      for (int64_t x = 0; x < (XS ? XS : X); ++x, from += nb, weight += step)
        for (int h = 0; h < TA; ++h)
          for (int w = 0; w < TB; ++w) {
            const V weighted = own[w] * from[h * X * nb + w];
            for (int i = 0; i < TY; ++i) sum[h][i][w] += weighted * weight[i];
          }
      if (!bias) continue;
      for (int h = 0; h < TA; ++h)
        for (int i = 0; i < TY; ++i)
          for (int w = 0; w < TB; ++w) sum[h][i][w] += own[w] * bias[k * bias_step + h * Y + i];
    }
    for (int h = 0; h < TA; ++h)
      for (int i = 0; i < TY; ++i)
        for (int w = 0; w < TB; ++w) to[(h * Y + i) * nb + b + w] = sum[h][i][w];
  }

  // dv = c x (+ l y), then the gradients of weights and children.
  void push_products(V* const* c, const V* x, V* const* l = nullptr, const V* y = nullptr) {
    for (parent = 0; parent < J; ++parent)
      for (k = 0; k < n; ++k) {
        const int64_t at = parent * D * nb;
        if (l) products(c[k] + parent * nb, x + at, l[k] + parent * nb, y + at, dv, D, nb);
        else products(c[k] + parent * nb, x + at, dv, D, nb);
        push();
      }
  }

  static void products(const V* c, const V* x, V* to, int64_t D, int64_t nb) {
    for (int64_t b = 0; b < nb; ++b) {
      const V own = c[b];
      for (int64_t at = b; at < D * nb; at += nb) to[at] = own * x[at];
    }
  }

  static void products(const V* c, const V* x, const V* l, const V* y, V* to, int64_t D, int64_t nb) {
    for (int64_t b = 0; b < nb; ++b) {
      const V own = c[b], slope = l[b];
#pragma GCC unroll 4
      for (int64_t at = b; at < D * nb; at += nb) to[at] = own * x[at] + slope * y[at];
    }
  }

  // c = softmax of l over the parents.
  void softmax() {
    for (k = 0; k < n; ++k) softmax_of(l[k], c[k], J, nb, p.leak);
  }

  static void softmax_of(const V* logits, V* to, int64_t J, int64_t nb, bool leak) {
    each_group(nb, [=](int64_t b, auto size) {
      constexpr int W = decltype(size)::value;
      V most[W], total[W];
      for (int w = 0; w < W; ++w) most[w] = leak ? V{} : logits[b + w];
      for (int64_t j = 0; j < J; ++j)
        for (int w = 0; w < W; ++w) {
          const V own = logits[j * nb + b + w];
          most[w] = own > most[w] ? own : most[w];
        }
      for (int w = 0; w < W; ++w) total[w] = leak ? exp_of(-most[w]) : V{};
      for (int64_t j = 0; j < J; ++j)
        for (int w = 0; w < W; ++w) {
          const V power = exp_of(logits[j * nb + b + w] - most[w]);
          to[j * nb + b + w] = power;
          total[w] += power;
        }
      for (int w = 0; w < W; ++w) total[w] = T(1) / total[w];
      for (int64_t j = 0; j < J; ++j)
        for (int w = 0; w < W; ++w) to[j * nb + b + w] *= total[w];
    });
  }

  // dl = c (dc - Σ c dc)
  static void through_softmax(const V* c, const V* dc, V* dl, int64_t J, int64_t nb) {
    each_group(nb, [=](int64_t b, auto size) {
      constexpr int W = decltype(size)::value;
      V mean[W] = {};
      for (int64_t j = 0; j < J; ++j)
        for (int w = 0; w < W; ++w) mean[w] += c[j * nb + b + w] * dc[j * nb + b + w];
      for (int64_t j = 0; j < J; ++j)
        for (int w = 0; w < W; ++w) {
          const int64_t at = j * nb + b + w;
          dl[at] = c[at] * (dc[at] - mean[w]);
        }
    });
  }

  // Call a function with (first vector of lanes, their number), a constant: independent operations hide their latency.
  template <class F>
  static void each_group(int64_t nb, F function) {
    int64_t b = 0;
    for (; b + 4 <= nb; b += 4) function(b, Size<4>());
    for (; b < nb; ++b) function(b, Size<1>());
  }

  // Tiles of votes in registers -----------------------------------------------------------------------------------


  // Call a function with (pose component, vector of lanes, vote) for all votes of a tile.
  template <int TA, int TY, int TB, class F>
  static inline __attribute__((always_inline)) void each_vote(const Tile<TA, TY, TB>& vote, F function, int64_t Y) {
    for (int h = 0; h < TA; ++h)
      for (int i = 0; i < TY; ++i)
        for (int w = 0; w < TB; ++w) function(h * Y + i, w, vote[h][i][w]);
  }

  // The same, and accumulate the results in to[lanes]. Four independent accumulators hide the latency of the additions.
  template <int TA, int TY, int TB, class F>
  static inline __attribute__((always_inline)) void sum_votes(const Tile<TA, TY, TB>& vote, V* to, F function,
                                                              int64_t Y) {
    V part[4][TB] = {};
    for (int h = 0; h < TA; ++h)
      for (int i = 0; i < TY; ++i)
        for (int w = 0; w < TB; ++w) part[(h * TY + i) % 4][w] += function(h * Y + i, w, vote[h][i][w]);
    for (int w = 0; w < TB; ++w) to[w] += (part[0][w] + part[1][w]) + (part[2][w] + part[3][w]);
  }

  // Compute all votes of the block, parent by parent and tile by tile, and call a function on each tile, which `make`
  // creates for the tile's position in a panel of parents. With pushing, the resulting dv is propagated to the children.
  template <class F>
  void visit(F make, bool pushing = false) {
    for (parent = 0; parent < J; ++parent)
      for (k = 0; k < n; ++k) {
        each_tile([&](int64_t a, int64_t y, auto shape) { tile(a, y, shape, make); });
        if (pushing) push();
      }
  }

  // Call a function with (first row, first column, shape) of each tile of a vote.
  template <class F>
  inline void each_tile(F function) const {
    if (A == 1) {
      int64_t y = 0;
      for (; y + TILE / 2 <= Y; y += TILE / 2) function(0, y, Shape<1, TILE / 2, 2>());
      for (; y + 2 <= Y; y += 2) function(0, y, Shape<1, 2, 2>());
      for (; y < Y; ++y) function(0, y, Shape<1, 1, 1>());
    } else {
      int64_t a = 0;
      for (; a + 4 <= A; a += 4) each_column_tile<4>(a, function);
      for (; a + 2 <= A; a += 2) each_column_tile<2>(a, function);
      for (; a < A; ++a) each_column_tile<1>(a, function);
    }
  }

  template <int TA, class F>
  inline void each_column_tile(int64_t a, F& function) const {
    constexpr int TY = std::min(4, TILE / TA);
    int64_t y = 0;
    for (; y + TY <= Y; y += TY) function(a, y, Shape<TA, TY, 1>());
    for (; y + 2 <= Y; y += 2) function(a, y, Shape<TA, 2, 1>());
    for (; y < Y; ++y) function(a, y, Shape<TA, 1, 1>());
  }

  // Call a function with X as a constant, so that loops are unrolled, if it is common; otherwise with 0.
  template <int TA, int TY, int TB, class F>
  inline void with_columns(Shape<TA, TY, TB>, F function) const {
    constexpr bool WHOLE = TA * TY * TB == TILE;
    constexpr int FIXED_X = WHOLE && TA == 4 ? 4 : WHOLE && TA == 1 ? 8 : 0;  // of Tsai 2020, and of Sabour 2017
    if (FIXED_X && X == FIXED_X) function(Size<FIXED_X>());
    else function(Size<0>());
  }

  template <int TA, int TY, int TB, class F>
  inline void tile(int64_t a, int64_t y, Shape<TA, TY, TB> shape, F& make) {
    const T* bias = p.bias ? static_cast<const T*>(p.bias) + ((slot + k) * J + parent) * D + a * Y + y : nullptr;
    const auto function = make((parent * D + a * Y + y) * nb);
    with_columns(shape, [&](auto x_size) {
      make_tile<TA, TY, TB, decltype(x_size)::value>(u[k] + a * X * nb, weight() + parent * Y + y, bias, X, J * Y, Y, nb,
                                                     function);
    });
  }

  // Σ_x u[a][x] W[x][y] + bias[a][y] for all lanes of the chunk.
  template <int TA, int TY, int TB, int XS, class F>
  __attribute__((noinline)) static void make_tile(const V* u, const T* weight, const T* bias, int64_t X, int64_t step,
                                                  int64_t Y, int64_t nb, F function) {
    int64_t b = 0;
    for (; b + TB <= nb; b += TB) lanes_tile<TA, TY, TB, XS>(u + b, weight, bias, X, step, Y, nb, b, function);
    if constexpr (TB > 1)
      for (; b < nb; ++b) lanes_tile<TA, TY, 1, XS>(u + b, weight, bias, X, step, Y, nb, b, function);
  }

  template <int TA, int TY, int TB, int XS, class F>
  static inline __attribute__((always_inline)) void lanes_tile(const V* u, const T* weight, const T* bias, int64_t X,
                                                               int64_t step, int64_t Y, int64_t nb, int64_t b,
                                                               const F& function) {
    if (XS) X = XS;  // a compile-time constant: the loop is unrolled
    Tile<TA, TY, TB> vote;
    for (int h = 0; h < TA; ++h)
      for (int i = 0; i < TY; ++i)
        for (int w = 0; w < TB; ++w) vote[h][i][w] = V{} + (bias ? bias[h * Y + i] : T(0));
#pragma GCC unroll 8
    for (int64_t x = 0; x < (XS ? XS : X); ++x, u += nb, weight += step)
      for (int h = 0; h < TA; ++h)
        for (int i = 0; i < TY; ++i)
          for (int w = 0; w < TB; ++w) vote[h][i][w] += u[h * X * nb + w] * weight[i];
    function(vote, b);
  }

  const T* weight() const { return static_cast<const T*>(p.weight) + (slot + k) * X * J * Y; }

  // From dv to the gradients of weights, biases and children ----------------------------------------------------

  void push() {
    if (p.weight_grad) {
      T* to = static_cast<T*>(p.weight_grad) + (slot + k) * X * J * Y + parent * Y;
      int64_t x = 0;
      for (; x + 4 <= X; x += 4) weight_rows<4>(to + x * J * Y, u[k] + x * nb);
      for (; x < X; ++x) weight_rows<1>(to + x * J * Y, u[k] + x * nb);
    }
    if (p.bias_grad) {
      T* to = static_cast<T*>(p.bias_grad) + ((slot + k) * J + parent) * D;
      for (int64_t d = 0; d < D; ++d) {
        V total{};
        for (int64_t b = 0; b < nb; ++b) total += dv[d * nb + b];
        for (int lane = 0; lane < N; ++lane) to[d] += total[lane];
      }
    }
    if (p.pose_grad) {
      const T* factor = weight() + parent * Y;
      for (int64_t a = 0; a < A; ++a) {
        V* to = du[k] + a * X * nb;
        int64_t x = 0;
        for (; x + 4 <= X; x += 4) slot_rows<4>(to + x * nb, dv + a * Y * nb, factor + x * J * Y, Y, J * Y, nb);
        for (; x < X; ++x) slot_rows<1>(to + x * nb, dv + a * Y * nb, factor + x * J * Y, Y, J * Y, nb);
      }
    }
  }

  // dW = u^T dv, summed over rows and lanes; the sum over lanes is taken last.
  template <int H>
  void weight_rows(T* to, const V* left) {
    constexpr int W = std::max(1, N / H);
    int64_t y = 0;
    for (; y + W <= Y; y += W) weight_tile<H, W>(to + y, left, dv + y * nb, A, X * nb, Y * nb, J * Y, nb);
    for (; y < Y; ++y) weight_tile<H, 1>(to + y, left, dv + y * nb, A, X * nb, Y * nb, J * Y, nb);
  }

  template <int H, int W>
  __attribute__((noinline)) static void weight_tile(T* to, const V* left, const V* right, int64_t A, int64_t left_step,
                                                    int64_t right_step, int64_t step, int64_t nb) {
    V acc[std::max(N, H * W)] = {};
    for (int64_t a = 0; a < A; ++a, left += left_step, right += right_step)
      for (int64_t b = 0; b < nb; ++b)
        for (int h = 0; h < H; ++h)
          for (int w = 0; w < W; ++w) acc[h * W + w] += left[h * nb + b] * right[w * nb + b];
    if constexpr (W > 1) {
      const V total = sums_over_lanes<V, N>(acc);
      for (int h = 0; h < H; ++h)
        for (int w = 0; w < W; ++w) to[h * step + w] += total[h * W + w];
    } else {
      for (int h = 0; h < H; ++h)
        for (int lane = 0; lane < N; ++lane) to[h * step] += acc[h][lane];
    }
  }

  // du += dv W^T
  template <int H>
  __attribute__((noinline)) static void slot_rows(V* to, const V* from, const T* factor, int64_t Y, int64_t step,
                                                  int64_t nb) {
    int64_t b = 0;
    for (; b + TILE / 4 <= nb; b += TILE / 4) slot_tile<H, TILE / 4>(to + b, from + b, factor, Y, step, nb);
    for (; b + 2 <= nb; b += 2) slot_tile<H, 2>(to + b, from + b, factor, Y, step, nb);
    for (; b < nb; ++b) slot_tile<H, 1>(to + b, from + b, factor, Y, step, nb);
  }

  template <int H, int B>
  static inline __attribute__((always_inline)) void slot_tile(V* to, const V* from, const T* factor, int64_t Y,
                                                              int64_t step, int64_t nb) {
    V acc[H][B];
    for (int h = 0; h < H; ++h)
      for (int w = 0; w < B; ++w) acc[h][w] = to[h * nb + w];
    for (int64_t y = 0; y < Y; ++y, from += nb)
      for (int h = 0; h < H; ++h)
        for (int w = 0; w < B; ++w) acc[h][w] += from[w] * factor[h * step + y];
    for (int h = 0; h < H; ++h)
      for (int w = 0; w < B; ++w) to[h * nb + w] = acc[h][w];
  }

  // Between memory and panels -------------------------------------------------------------------------------------

  // Input of a slot, [A * X][lanes]: zeros for padding and for unused lanes.
  void read() {
    T* panel = reinterpret_cast<T*>(u[k]);
    const T* pose = static_cast<const T*>(p.pose);
    each_run([&](const int64_t* at, int64_t from, int64_t row, int64_t lane, auto size) {
      constexpr int R = decltype(size)::value;
      T* to = panel + row * nb * N + lane;
      if constexpr (R == 1) {
        for (int w = 0; w < N; ++w) to[w] = at[w] < 0 ? T(0) : pose[at[w] + from];
      } else {
        const int64_t next = from + BLOCK * p.steps[3];  // of the same positions in the next block
        for (int w = 0; w < N; ++w) __builtin_prefetch(pose + std::max<int64_t>(0, at[w]) + next);
        V rows[R];
        for (int w = 0; w < R; ++w) rows[w] = joined<R>(pose + from, at + w);
        transpose<R>(rows);
        for (int w = 0; w < R; ++w) std::memcpy(to + w * nb * N, &rows[w], sizeof(V));
      }
    });
  }

  void write_back() {
    if (!p.pose_grad) return;
    const T* panel = reinterpret_cast<const T*>(du[k]);
    T* pose = static_cast<T*>(p.pose_grad);
    each_run([&](const int64_t* at, int64_t to, int64_t row, int64_t lane, auto size) {
      constexpr int R = decltype(size)::value;
      const T* from = panel + row * nb * N + lane;
      if constexpr (R == 1) {
        for (int w = 0; w < N; ++w)
          if (at[w] >= 0) pose[at[w] + to] += from[w];
      } else {
        V rows[R];
        for (int w = 0; w < R; ++w) std::memcpy(&rows[w], from + w * nb * N, sizeof(V));
        transpose<R>(rows);
        for (int w = 0; w < R; ++w) add_parts<R>(rows[w], pose + to, at + w);
      }
    });
  }

  // Call a function for each block of input values and N lanes: (positions of the lanes, offset of the first value from
  // them, row of the panel, first lane, number of values), a constant.
  template <class F>
  inline void each_run(F function) const {
    const int64_t reads = p.by_type ? p.cells : 1, own = p.columns;
    const int64_t first_cell = p.by_type ? 0 : (slot + k) / p.types, type = (slot + k) % p.types;
    const int64_t n_runs = reads == 1 ? 1 : A, length = reads == 1 ? A * own : own;  // contiguous values
    for (int64_t cell = 0; cell < reads; ++cell)
      for (int64_t lane = 0; lane < nb * N; lane += N) {
        const int64_t* at = &positions[(first_cell + cell) * p.chunk + lane];
        for (int64_t run = 0; run < n_runs; ++run) {
          const int64_t from = type * p.steps[3] + run * own, row = run * X + cell * own;
          int64_t x = 0;
          if constexpr (N >= 16)
            for (; x + 16 <= length; x += 16) function(at, from + x, row + x, lane, Size<16>());
          if constexpr (N >= 8)
            for (; x + 8 <= length; x += 8) function(at, from + x, row + x, lane, Size<8>());
          if constexpr (N >= 4)
            for (; x + 4 <= length; x += 4) function(at, from + x, row + x, lane, Size<4>());
          for (; x < length; ++x) function(at, from + x, row + x, lane, Size<1>());
        }
      }
  }

  // A register with R values from each of the positions at[0], at[R], at[2 R]..., zeros from those that are negative.
  template <int R, int W = N>
  static inline typename Vector<T, W>::Type joined(const T* from, const int64_t* at) {
    if constexpr (R == W) {
      typename Vector<T, W>::Type values{};
      if (*at >= 0) std::memcpy(&values, from + *at, sizeof values);
      return values;
    } else {
      return concatenated(joined<R, W / 2>(from, at), joined<R, W / 2>(from, at + W / 2), std::make_index_sequence<W>());
    }
  }

  // Add the values of a register to those positions: the inverse of `joined`.
  template <int R>
  static inline void add_parts(const V& values, T* to, const int64_t* at) {
    typedef typename Vector<T, R>::Type Part;
    for (int part = 0; part < N / R; ++part) {
      if (at[part * R] < 0) continue;
      Part own, sum;
      std::memcpy(&own, reinterpret_cast<const T*>(&values) + part * R, sizeof own);
      std::memcpy(&sum, to + at[part * R], sizeof sum);
      sum += own;
      std::memcpy(to + at[part * R], &sum, sizeof sum);
    }
  }

  // Transpose the matrices of R rows and columns that the registers have side by side.
  template <int R, int Half = R / 2>
  static inline void transpose(V* rows) {
    for (int w = 0; w < R; ++w) {
      if (w & Half) continue;
      const V a = rows[w], b = rows[w + Half];
      rows[w] = exchanged<V, Half, 0>(a, b, std::make_index_sequence<N>());
      rows[w + Half] = exchanged<V, Half, 1>(a, b, std::make_index_sequence<N>());
    }
    if constexpr (Half > 1) transpose<R, Half / 2>(rows);
  }

  void load_pairs(V* to, const T* from) const {  // of [lanes, I, J]
    T* panel = reinterpret_cast<T*>(to);
    for (int64_t lane = 0; lane < nb * N; ++lane)
      for (int64_t j = 0; j < J; ++j)
        panel[j * nb * N + lane] = lane < used ? from[((start + lane) * p.slots + slot + k) * J + j] : T(0);
  }

  void store_pairs(const V* from, T* to) const {
    const T* panel = reinterpret_cast<const T*>(from);
    for (int64_t lane = 0; lane < used; ++lane)
      for (int64_t j = 0; j < J; ++j) to[((start + lane) * p.slots + slot + k) * J + j] = panel[j * nb * N + lane];
  }

  void load_parents(V* to, const T* from, int64_t size) const {  // of [lanes, size]
    T* panel = reinterpret_cast<T*>(to);
    for (int64_t lane = 0; lane < nb * N; ++lane)
      for (int64_t d = 0; d < size; ++d)
        panel[d * nb * N + lane] = lane < used ? from[(start + lane) * size + d] : T(0);
  }

  void store_parents(const V* from, T* to, int64_t size, bool add) const {
    const T* panel = reinterpret_cast<const T*>(from);
    for (int64_t lane = 0; lane < used; ++lane)
      for (int64_t d = 0; d < size; ++d) {
        T& offset = to[(start + lane) * size + d];
        offset = (add ? offset : T(0)) + panel[d * nb * N + lane];
      }
  }

  const Pass& p;
  const int64_t A, X, J, Y, D;
  int64_t nb;                       // vectors of lanes in the chunk: fewer in the last one
  int64_t start = 0, used = 0;      // first lane of the chunk, and its number of lanes
  int64_t slot = 0, n = 0;          // first slot of the block, and its number of slots
  int64_t k = 0, parent = 0;        // current slot of the block and current parent
  std::vector<int64_t> positions;
  V* memory;
  V *u[BLOCK], *du[BLOCK], *c[BLOCK], *l[BLOCK], *dc[BLOCK];  // per slot: input, couplings, logits and gradients
  V *first, *second, *sum, *other, *dv;
  V *act[BLOCK], *dact[BLOCK], *of_total, *of_squares, *center, *constant, *mass, *dconstant, *score;  // from FIT on
  V *square[BLOCK], *plain[BLOCK], *logit[BLOCK];
};

// Couplings of parents that a child does not choose are products of small numbers. Below the smallest normal number the
// processor takes over a hundred cycles per operation: while this exists, such numbers are 0.
struct FlushDenormals {
#if defined(__SSE2__)
  const unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }  // flush to zero, and denormals are zero
  ~FlushDenormals() { _mm_setcsr(before); }
#endif
};

}  // namespace

extern "C" {
void torchcaps_forward(const Pass* pass) {  // REAL: float or double
  const FlushDenormals flush;
  Runner<REAL>(*pass).forward();
}
void torchcaps_backward(const Pass* pass) {
  const FlushDenormals flush;
  Runner<REAL>(*pass).backward();
}
}
