/* `Grower.grow` of growth.py in C, for compiled_growth.py. What the numbers mean, and when a node is looked behind, is
   said there; both find the same trees (tests/test_compiled_growth.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#define VERSION 1     /* of what `grow` is given and returns: compiled_growth.py asks for its own */
#define ROW_LENGTH 32 /* ids of a row, at most */
#define FIRST_SOURCES 64
#define MAX_SIZE 1000000 /* of nodes, and of depth */

typedef enum { NEW, GREEDY, RACE, ONE_GUESS } Mode; /* NEW: a row whose guesses are in no order yet */

/* What may follow a node, surest guess first. */
typedef struct {
    Mode mode;
    int node, first;
    int next, count;
    double chance; /* of the node */
    double scale, rest, sharpness;
    int token, kind; /* the next guess */
    int32_t row[ROW_LENGTH]; /* ids with grades; ids alone in a race */
    float times[ROW_LENGTH];
} Source;

/* In the heap: the next guess of a source. */
typedef struct {
    double chance;
    long order; /* of being pushed */
    int source;
} Entry;

/* Where an earlier occurrence of a text's end goes on. Lists and tuples belong to the caller. */
typedef struct {
    PyObject *following, *kinds;
    Py_ssize_t number, length;
} Pointer;

typedef struct {
    int parent, token;
    Pointer pointer;
} Followed;

typedef struct {
    int token, parent, kind, depth;
    double chance;
} Node;

/* Rows of int32 by place, and where the row of a key is. */
typedef struct {
    PyObject *places; /* dict, of the caller */
    Py_buffer rows;
    Py_ssize_t count, length;
} Table;

typedef struct {
    /* What the caller knows. */
    Table pairs, singles, alone, alone_pairs;
    int before, last; /* the last two ids of the text */
    PyObject *similar, *draws_at, *stop; /* callables or None */
    PyObject *more_rows; /* behind the root */
    int max_depth, size;
    double least;
    /* The rules of growth.py and acceptance.py. */
    double both_rows, similar_rows, likely_child, tiny;
    int greedy_length, grade_bits, max_match, foreign, pair, single, vocabulary;
    Py_buffer edges, middles, bins; /* of bins float64; by grade float32 and int32 */
    Py_buffer sharpness;            /* by kind, float64 */
    double *chances;
    Py_ssize_t num_kinds;
    /* What has been found. */
    Py_buffer *draws; /* by depth; without an object where there are none */
    char *has_asked;  /* for these draws */
    Source *sources;
    int num_sources, sources_room;
    Entry *heap; /* as much room as for sources, of which each has at most one guess here */
    int heap_size;
    long num_pushed;
    Node *nodes;
    int num_nodes;
    Followed *followed;
    int num_followed, followed_room;
} Growth;

/* ---- Arguments ------------------------------------------------------------------------------------------------ */

static int
get_array(PyObject *from, Py_buffer *view, char kind, Py_ssize_t itemsize, int ndim)
{
    if (PyObject_GetBuffer(from, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    const char *format = view->format == NULL ? "B" : view->format; /* of several characters: another byte order */
    int is_kind = strlen(format) == 1 && (kind == 'i' ? strchr("ilq", *format) != NULL : *format == kind);
    if (view->ndim != ndim || view->itemsize != itemsize || !is_kind) {
        PyErr_Format(PyExc_TypeError, "an array must have %d dimensions of '%c%zd', got %d of '%s%zd'", ndim, kind,
                     itemsize, view->ndim, format, view->itemsize);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static int
get_rows(PyObject *from, Table *table)
{
    if (get_array(from, &table->rows, 'i', sizeof(int32_t), 2) < 0)
        return -1;
    table->count = table->rows.shape[0];
    table->length = table->rows.shape[1];
    if (table->length < 1 || table->length > ROW_LENGTH) {
        PyErr_Format(PyExc_ValueError, "rows must have 1 to %d ids, got %zd", ROW_LENGTH, table->length);
        return -1;
    }
    return 0;
}

static int
has_all_grades(const Growth *g)
{
    Py_ssize_t count = (Py_ssize_t)1 << g->grade_bits;
    if (g->middles.shape[0] == count && g->bins.shape[0] == count)
        return 0;
    PyErr_Format(PyExc_ValueError, "there must be %zd grades, got %zd and %zd", count, g->middles.shape[0],
                 g->bins.shape[0]);
    return -1;
}

static int
read_chances(Growth *g, PyObject *chances)
{
    g->num_kinds = PyList_GET_SIZE(chances);
    g->chances = PyMem_Malloc((g->num_kinds + 1) * sizeof(double));
    if (g->chances == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < g->num_kinds; i++) {
        g->chances[i] = PyFloat_AsDouble(PyList_GET_ITEM(chances, i));
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

static void *
grown(void *array, int count, int *room, size_t size)
{
    if (count < *room)
        return array;
    void *larger = PyMem_Realloc(array, 2 * (size_t)*room * size);
    if (larger == NULL)
        PyErr_NoMemory();
    else
        *room *= 2;
    return larger;
}

/* ---- The heap: the next guess of each source, the surest first, of equally sure ones the first ----------------- */

static int
comes_first(const Entry *a, const Entry *b)
{
    return a->chance > b->chance || (a->chance == b->chance && a->order < b->order);
}

static void
heap_push(Growth *g, Entry new)
{
    int place = g->heap_size++;
    while (place > 0 && comes_first(&new, &g->heap[(place - 1) / 2])) {
        g->heap[place] = g->heap[(place - 1) / 2];
        place = (place - 1) / 2;
    }
    g->heap[place] = new;
}

static Entry
heap_pop(Growth *g)
{
    Entry first = g->heap[0], last = g->heap[--g->heap_size];
    int place = 0;
    for (;;) {
        int child = 2 * place + 1;
        if (child >= g->heap_size)
            break;
        if (child + 1 < g->heap_size && comes_first(&g->heap[child + 1], &g->heap[child]))
            child++;
        if (!comes_first(&g->heap[child], &last))
            break;
        g->heap[place] = g->heap[child];
        place = child;
    }
    g->heap[place] = last;
    return first;
}

/* ---- Sources --------------------------------------------------------------------------------------------------- */

static int
is_known(const Growth *g, int parent, int token)
{
    for (int node = g->num_nodes - 1; node >= 0; node--)
        if (g->nodes[node].token == token && g->nodes[node].parent == parent)
            return 1;
    return 0;
}

static int
has_kind(const Growth *g, int kind)
{
    if (kind >= 0 && kind < g->num_kinds)
        return 1;
    PyErr_Format(PyExc_ValueError, "kinds must be below %zd, got %d", g->num_kinds, kind);
    return 0;
}

static int
bin_of(const Growth *g, double chance)
{
    const double *edges = g->edges.buf;
    int count = (int)g->edges.shape[0], bin = 0;
    while (bin < count && edges[bin] < chance)
        bin++;
    return bin;
}

/* Put the next guess of a source into the heap. */
static int
push_next(Growth *g, int index)
{
    Source *source = &g->sources[index];
    const int32_t *bins = g->bins.buf;
    while (source->next < source->count) {
        int token = source->token, kind = source->kind;
        if (source->mode == GREEDY) {
            int32_t both = source->row[source->next];
            token = both >> g->grade_bits;
            kind = source->first + bins[both & ((1 << g->grade_bits) - 1)];
        }
        else if (source->mode == RACE) {
            int winner = -1; /* of equal times the first */
            for (int i = 0; i < source->count; i++)
                if (!isnan(source->times[i]) && (winner < 0 || source->times[i] < source->times[winner]))
                    winner = i;
            if (winner < 0)
                return 0;
            double time = source->times[winner];
            source->times[winner] = NAN; /* taken */
            token = source->row[winner];
            kind = source->first + bin_of(g, pow(time, -source->sharpness) * source->scale * exp(source->rest * time));
        }
        source->next++;
        if (!has_kind(g, kind))
            return -1;
        double chance = source->chance * g->chances[kind];
        if (chance < g->least)
            return 0;
        if (is_known(g, source->node, token))
            continue;
        source->token = token;
        source->kind = kind;
        heap_push(g, (Entry){chance, ++g->num_pushed, index});
        return 0;
    }
    return 0;
}

static Source *
new_source(Growth *g)
{
    int room = g->sources_room;
    Source *sources = grown(g->sources, g->num_sources, &g->sources_room, sizeof(Source));
    if (sources == NULL)
        return NULL;
    g->sources = sources;
    if (g->sources_room != room) {
        Entry *heap = PyMem_Realloc(g->heap, (size_t)g->sources_room * sizeof(Entry));
        if (heap == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        g->heap = heap;
    }
    return &g->sources[g->num_sources++];
}

/* Take in a row behind a node; its guesses are ordered and pushed later. */
static int
add_row(Growth *g, int node, double chance, int first, const int32_t *row, Py_ssize_t length)
{
    Source *source = new_source(g);
    if (source == NULL)
        return -1;
    source->mode = NEW;
    source->node = node;
    source->first = first;
    source->chance = chance;
    source->next = source->token = source->kind = 0;
    source->count = (int)length;
    memcpy(source->row, row, length * sizeof(int32_t));
    return 0;
}

static int
add_row_object(Growth *g, int node, double chance, PyObject *found)
{
    PyObject *row;
    int first;
    Py_buffer view;
    if (!PyArg_ParseTuple(found, "Oi", &row, &first) || get_array(row, &view, 'i', sizeof(int32_t), 1) < 0)
        return -1;
    Py_ssize_t length = view.shape[0];
    int result = -1;
    if (length < 1 || length > ROW_LENGTH)
        PyErr_Format(PyExc_ValueError, "rows must have 1 to %d ids, got %zd", ROW_LENGTH, length);
    else
        result = add_row(g, node, chance, first, view.buf, length);
    PyBuffer_Release(&view);
    return result;
}

/* Put what followed an earlier occurrence into the heap. */
static int
follow(Growth *g, Pointer pointer, int node, double chance)
{
    if (pointer.number < 0 || pointer.number >= PyList_GET_SIZE(pointer.following))
        return 0;
    int guess = (int)PyLong_AsLong(PyList_GET_ITEM(pointer.following, pointer.number));
    if (guess == -1 && PyErr_Occurred())
        return -1;
    if (guess == g->foreign)
        return 0;
    Py_ssize_t length = pointer.length < g->max_match ? pointer.length : g->max_match;
    if (length < 0 || length >= PyTuple_GET_SIZE(pointer.kinds)) {
        PyErr_Format(PyExc_ValueError, "the length of a match must be below %zd, got %zd",
                     PyTuple_GET_SIZE(pointer.kinds), length);
        return -1;
    }
    int kind = (int)PyLong_AsLong(PyTuple_GET_ITEM(pointer.kinds, length));
    if (kind == -1 && PyErr_Occurred())
        return -1;
    Source *source = new_source(g);
    if (source == NULL)
        return -1;
    source->mode = ONE_GUESS;
    source->node = node;
    source->token = guess;
    source->kind = kind;
    source->chance = chance;
    source->next = 0;
    source->count = 1;
    Followed *followed = grown(g->followed, g->num_followed, &g->followed_room, sizeof(Followed));
    if (followed == NULL)
        return -1;
    g->followed = followed;
    pointer.number++;
    pointer.length++;
    g->followed[g->num_followed++] = (Followed){node, guess, pointer};
    return push_next(g, g->num_sources - 1);
}

/* The row of a key: 1 if there is one, 0 if not, -1 with an error set. */
static int
find_row(const Table *table, PyObject *key, const int32_t **row)
{
    PyObject *found = PyDict_GetItemWithError(table->places, key);
    if (found == NULL)
        return PyErr_Occurred() ? -1 : 0;
    Py_ssize_t place = PyLong_AsSsize_t(found);
    if (place == -1 && PyErr_Occurred())
        return -1;
    if (place < 0 || place >= table->count) /* another thread has enlarged the table since */
        return 0;
    *row = (const int32_t *)table->rows.buf + place * table->length;
    return 1;
}

/* The rows behind a node. before, token: the last two ids there. */
static int
add_rows(Growth *g, int node, int parent, int before, int token, double chance)
{
    if (g->similar != Py_None && chance >= g->similar_rows) {
        PyObject *found = PyObject_CallFunction(g->similar, "iiii", node, parent, before, token);
        if (found == NULL)
            return -1;
        int result = found == Py_None ? 0 : add_row_object(g, node, chance, found);
        Py_DECREF(found);
        if (result < 0)
            return -1;
    }
    const int32_t *row;
    PyObject *key = PyLong_FromLongLong((int64_t)((uint64_t)(int64_t)before << 32) | (int64_t)token);
    if (key == NULL)
        return -1;
    Py_ssize_t length = g->pairs.length;
    int has_pair = find_row(&g->pairs, key, &row);
    if (has_pair == 0) {
        length = g->alone_pairs.length;
        has_pair = find_row(&g->alone_pairs, key, &row);
    }
    Py_DECREF(key);
    if (has_pair < 0 || (has_pair && add_row(g, node, chance, g->pair, row, length) < 0))
        return -1;
    if (has_pair && chance < g->both_rows)
        return 0;
    key = PyLong_FromLong(token);
    if (key == NULL)
        return -1;
    int has_single = find_row(&g->singles, key, &row);
    Py_DECREF(key);
    if (has_single < 0)
        return -1;
    if (has_single)
        return add_row(g, node, chance, g->single, row, g->singles.length);
    if (!has_pair && token >= 0 && token < g->alone.count)
        return add_row(g, node, chance, g->vocabulary, (int32_t *)g->alone.rows.buf + token * g->alone.length,
                       g->alone.length);
    return 0;
}

/* The draws of a token at some distance from the root: NULL where there are none, or with an error set. */
static const Py_buffer *
draws_of(Growth *g, int depth)
{
    Py_buffer *draws = &g->draws[depth];
    if (!g->has_asked[depth]) {
        g->has_asked[depth] = 1;
        PyObject *found = PyObject_CallFunction(g->draws_at, "i", depth);
        if (found == NULL)
            return NULL;
        if (found != Py_None && get_array(found, draws, 'f', sizeof(float), 1) == 0 && draws->shape[0] < 1)
            PyErr_SetString(PyExc_ValueError, "draws must not be empty");
        Py_DECREF(found);
    }
    return draws->obj == NULL ? NULL : draws;
}

/* Order a row's guesses: by the times of `races` in coming_draws.py, or, without draws, as they are. */
static int
order_guesses(Growth *g, Source *source, const Py_buffer *draws)
{
    if (draws == NULL) {
        source->mode = GREEDY;
        if (source->count > g->greedy_length)
            source->count = g->greedy_length;
        return 0;
    }
    if (source->first < 0 || source->first >= g->sharpness.shape[0]) {
        PyErr_Format(PyExc_ValueError, "kinds must be below %zd, got %d", g->sharpness.shape[0], source->first);
        return -1;
    }
    const float *drawn = draws->buf, *middles = g->middles.buf;
    const float tiny = (float)g->tiny;
    Py_ssize_t num_drawn = draws->shape[0];
    int32_t mask = (1 << g->grade_bits) - 1, lowest = source->row[source->count - 1] & ~mask;
    double sharpness = ((double *)g->sharpness.buf)[source->first];
    float total = 0.0f, known = 0.0f;
    source->mode = RACE;
    for (int i = source->count; i < ROW_LENGTH; i++) /* short rows repeat their last id, in the lowest grade */
        source->row[i] = lowest;
    source->count = ROW_LENGTH;
    for (int i = 0; i < ROW_LENGTH; i++) {
        int32_t both = source->row[i];
        Py_ssize_t token = both >> g->grade_bits;
        float chance = middles[both & mask];
        float draw = drawn[token < 0 ? 0 : token < num_drawn ? token : num_drawn - 1];
        float time = (draw < tiny ? tiny : draw) / chance;
        source->row[i] = (int32_t)token;
        source->times[i] = time;
        total += powf(time, (float)-sharpness);
        known += chance;
    }
    source->scale = 1.0 / total;
    source->rest = known < 1.0f ? known - 1.0 : 0.0;
    source->sharpness = sharpness;
    return 0;
}

/* Put what may follow some nodes into the heap. nodes: -1 for the root. */
static int
look_behind(Growth *g, const int *nodes, int count)
{
    int begin = g->num_sources;
    for (int i = 0; i < count; i++) {
        int node = nodes[i];
        if (node < 0) {
            if (add_rows(g, -1, -2, g->before, g->last, 1.0) < 0)
                return -1;
            for (Py_ssize_t k = 0; k < PyList_GET_SIZE(g->more_rows); k++)
                if (add_row_object(g, -1, 1.0, PyList_GET_ITEM(g->more_rows, k)) < 0)
                    return -1;
            continue;
        }
        Node at = g->nodes[node];
        if (add_rows(g, node, at.parent, at.parent < 0 ? g->last : g->nodes[at.parent].token, at.token, at.chance) < 0)
            return -1;
        for (int k = g->num_followed - 1; k >= 0; k--)
            if (g->followed[k].parent == at.parent && g->followed[k].token == at.token) {
                if (follow(g, g->followed[k].pointer, node, at.chance) < 0)
                    return -1;
                break;
            }
    }
    for (int i = begin; i < g->num_sources; i++) {
        if (g->sources[i].mode != NEW)
            continue;
        const Py_buffer *draws = draws_of(g, g->sources[i].node < 0 ? 1 : g->nodes[g->sources[i].node].depth + 1);
        if (PyErr_Occurred() || order_guesses(g, &g->sources[i], draws) < 0 || push_next(g, i) < 0)
            return -1;
    }
    return 0;
}

/* ---- The tree -------------------------------------------------------------------------------------------------- */

static int
asks_to_stop(const Growth *g, double expected, double chance)
{
    if (g->stop == Py_None)
        return 0;
    PyObject *answer = PyObject_CallFunction(g->stop, "idd", g->num_nodes, expected, chance);
    if (answer == NULL)
        return -1;
    int stops = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return stops;
}

/* Whether the growth was stopped; -1 with an error set. waiting: room for `size` nodes that were not looked behind. */
static int
grow_tree(Growth *g, PyObject *pointers, int *waiting)
{
    static const int root = -1;
    int num_waiting = 0, is_stopped = 0;
    double expected = 0.0;
    if (g->size > 0 && g->max_depth > 0) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pointers); i++) {
            Pointer pointer;
            if (!PyArg_ParseTuple(PyList_GET_ITEM(pointers, i), "O!nnO!", &PyList_Type, &pointer.following,
                                  &pointer.number, &pointer.length, &PyTuple_Type, &pointer.kinds)
                || follow(g, pointer, -1, 1.0) < 0)
                return -1;
        }
        if (look_behind(g, &root, 1) < 0)
            return -1;
        is_stopped = asks_to_stop(g, 0.0, g->heap_size ? g->heap[0].chance : 0.0);
    }
    while (g->num_nodes < g->size && !is_stopped) {
        if (num_waiting && (!g->heap_size || g->heap[0].chance <= g->likely_child * g->nodes[waiting[0]].chance)) {
            if (look_behind(g, waiting, num_waiting) < 0)
                return -1;
            num_waiting = 0;
            continue;
        }
        if (!g->heap_size)
            break;
        Entry best = heap_pop(g);
        Node node = {g->sources[best.source].token, g->sources[best.source].node, g->sources[best.source].kind, 1,
                     best.chance};
        if (push_next(g, best.source) < 0)
            return -1;
        if (is_known(g, node.parent, node.token)) /* a surer source has said the same */
            continue;
        if (node.parent >= 0)
            node.depth = g->nodes[node.parent].depth + 1;
        g->nodes[g->num_nodes++] = node;
        expected += node.chance;
        is_stopped = asks_to_stop(g, expected, node.chance);
        if (node.depth < g->max_depth && node.chance * g->likely_child >= g->least)
            waiting[num_waiting++] = g->num_nodes - 1;
    }
    return is_stopped;
}

/* The nodes, likeliest first, as lists of tokens, parents, kinds, chances and depths. */
static PyObject *
as_lists(const Growth *g, int *order, int *place)
{
    int count = g->num_nodes;
    for (int i = 0; i < count; i++) { /* they are nearly sorted */
        int k = i;
        for (; k > 0 && g->nodes[order[k - 1]].chance < g->nodes[i].chance; k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
    for (int i = 0; i < count; i++)
        place[order[i]] = i;
    PyObject *lists = PyTuple_New(5);
    for (int column = 0; lists != NULL && column < 5; column++) {
        PyObject *list = PyList_New(count);
        if (list == NULL)
            Py_CLEAR(lists);
        else
            PyTuple_SET_ITEM(lists, column, list);
        for (int i = 0; lists != NULL && i < count; i++) {
            const Node *node = &g->nodes[order[i]];
            long number = column == 0   ? node->token
                          : column == 1 ? (node->parent < 0 ? -1 : place[node->parent])
                          : column == 2 ? node->kind
                                        : node->depth;
            PyObject *item = column == 3 ? PyFloat_FromDouble(node->chance) : PyLong_FromLong(number);
            if (item == NULL)
                Py_CLEAR(lists);
            else
                PyList_SET_ITEM(list, i, item);
        }
    }
    return lists;
}

PyDoc_STRVAR(grow_doc,
             "grow(tables, text, calls, rows, pointers, chances, rules, arrays, max_depth, size, least)\n"
             "\n"
             "The likeliest tree of at most `size` nodes, none of whose chance is below `least`: lists of tokens,\n"
             "parents, kinds, chances and depths, and whether `stop` has ended the growth. Everything is as for\n"
             "CompiledGrower, which calls this.");

static PyObject *
grow(PyObject *module, PyObject *args)
{
    (void)module;
    Growth g;
    memset(&g, 0, sizeof(g));
    PyObject *pairs, *singles, *alone, *alone_pairs, *pointers, *chances, *edges, *middles, *bins, *sharpness;
    PyObject *result = NULL, *lists;
    int *waiting = NULL, is_stopped = -1;
    if (!PyArg_ParseTuple(args, "(O!OO!OOO!O)(ii)(OOO)O!O!O!(ddddiiiiiii)(OOOO)iid:grow",
                          &PyDict_Type, &g.pairs.places, &pairs, &PyDict_Type, &g.singles.places, &singles,
                          &alone, &PyDict_Type, &g.alone_pairs.places, &alone_pairs,
                          &g.before, &g.last, &g.similar, &g.draws_at, &g.stop,
                          &PyList_Type, &g.more_rows, &PyList_Type, &pointers, &PyList_Type, &chances,
                          &g.both_rows, &g.similar_rows, &g.likely_child, &g.tiny, &g.greedy_length, &g.grade_bits,
                          &g.max_match, &g.foreign, &g.pair, &g.single, &g.vocabulary,
                          &edges, &middles, &bins, &sharpness, &g.max_depth, &g.size, &g.least))
        return NULL;
    if (g.max_depth > MAX_SIZE || g.size > MAX_SIZE) {
        PyErr_Format(PyExc_ValueError, "max_depth and size must be at most %d, got %d and %d", MAX_SIZE, g.max_depth,
                     g.size);
        return NULL;
    }
    g.max_depth = g.max_depth < 0 ? 0 : g.max_depth;
    g.size = g.size < 0 ? 0 : g.size;
    g.sources_room = g.followed_room = FIRST_SOURCES;
    g.draws = PyMem_Calloc((size_t)g.max_depth + 1, sizeof(Py_buffer));
    g.has_asked = PyMem_Calloc((size_t)g.max_depth + 1, 1);
    g.sources = PyMem_Malloc(FIRST_SOURCES * sizeof(Source));
    g.heap = PyMem_Malloc(FIRST_SOURCES * sizeof(Entry));
    g.followed = PyMem_Malloc(FIRST_SOURCES * sizeof(Followed));
    g.nodes = PyMem_Malloc(((size_t)g.size + 1) * sizeof(Node));
    waiting = PyMem_Malloc(2 * ((size_t)g.size + 1) * sizeof(int));
    if (!g.draws || !g.has_asked || !g.sources || !g.heap || !g.followed || !g.nodes || !waiting)
        PyErr_NoMemory();
    else if (get_rows(pairs, &g.pairs) == 0 && get_rows(singles, &g.singles) == 0 && get_rows(alone, &g.alone) == 0
             && get_rows(alone_pairs, &g.alone_pairs) == 0 && get_array(edges, &g.edges, 'd', sizeof(double), 1) == 0
             && get_array(middles, &g.middles, 'f', sizeof(float), 1) == 0
             && get_array(bins, &g.bins, 'i', sizeof(int32_t), 1) == 0
             && get_array(sharpness, &g.sharpness, 'd', sizeof(double), 1) == 0 && has_all_grades(&g) == 0
             && read_chances(&g, chances) == 0)
        is_stopped = grow_tree(&g, pointers, waiting);
    if (is_stopped >= 0) {
        lists = as_lists(&g, waiting, waiting + g.size + 1);
        if (lists != NULL)
            result = Py_BuildValue("NO", lists, is_stopped ? Py_True : Py_False);
    }
    Py_buffer *views[] = {&g.pairs.rows, &g.singles.rows, &g.alone.rows, &g.alone_pairs.rows,
                          &g.edges, &g.middles, &g.bins, &g.sharpness};
    for (size_t i = 0; i < sizeof(views) / sizeof(*views); i++)
        PyBuffer_Release(views[i]); /* nothing where there is none */
    for (int depth = 0; g.draws != NULL && depth <= g.max_depth; depth++)
        PyBuffer_Release(&g.draws[depth]);
    PyMem_Free(g.draws);
    PyMem_Free(g.has_asked);
    PyMem_Free(g.sources);
    PyMem_Free(g.heap);
    PyMem_Free(g.followed);
    PyMem_Free(g.nodes);
    PyMem_Free(g.chances);
    PyMem_Free(waiting);
    return result;
}

static PyMethodDef methods[] = {{"grow", grow, METH_VARARGS, grow_doc}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_growth", "Growing a token tree, in C.", -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__growth(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL
        && (PyModule_AddIntConstant(module, "VERSION", VERSION) < 0
            || PyModule_AddIntConstant(module, "ROW_LENGTH", ROW_LENGTH) < 0))
        Py_CLEAR(module);
    return module;
}
