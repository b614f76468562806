// Runs the calls of a tape. taping/tape.py says what the numbers mean and has this loop in Python, as the reference: a lean
// step of small microbatches makes ten thousand calls, and Python's own work for each took as long as a small kernel.
#include <vector>

#include "core.h"

namespace {

// What calls of alike layers have in common, in the order of taping/tape.py's Head.
struct Head {
  PyObject *function, *args, *kwargs, *places;
  Py_ssize_t fills;
  explicit Head(PyObject* head)
      : function(PyTuple_GET_ITEM(head, 0)), args(PyTuple_GET_ITEM(head, 1)), kwargs(PyTuple_GET_ITEM(head, 2)),
        places(PyTuple_GET_ITEM(head, 3)), fills(PyLong_AsSsize_t(PyTuple_GET_ITEM(head, 4))) {}
};

// The tensors by their numbers: a list of Python's, for they die with its last reference.
struct Slots {
  PyObject* list;
  PyObject* operator[](int64_t number) const { return PyList_GET_ITEM(list, number); }
  void set(int64_t number, PyObject* value) { PyList_SetItem(list, number, Py_NewRef(value)); }
};

// The arguments of one call. Nothing here holds a tensor but copies of lists, whose originals are for other runs.
class Arguments {
 public:
  template <class Number>
  Arguments(const Head& head, Slots slots, const Number*& next) : values(PyTuple_GET_SIZE(head.args)) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = PyTuple_GET_ITEM(head.args, i);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(head.places); ++i) {
      PyObject* place = PyTuple_GET_ITEM(head.places, i);
      if (PyLong_Check(place)) values[PyLong_AsSsize_t(place)] = slots[*next++];
      else put_inside(at(place, 0), at(place, 1), slots[*next++]);
    }
  }
  PyObject* const* data() const { return values.data(); }
  size_t size() const { return values.size(); }

 private:
  static Py_ssize_t at(PyObject* pair, int which) { return PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, which)); }

  void put_inside(Py_ssize_t outer, Py_ssize_t inner, PyObject* tensor) {  // places go by their outer number
    if (lists.empty() || lists.back().ptr() != values[outer]) lists.push_back(nb::steal(PySequence_List(values[outer])));
    PyList_SetItem(lists.back().ptr(), inner, Py_NewRef(tensor));
    values[outer] = lists.back().ptr();
  }

  std::vector<PyObject*> values;
  std::vector<nb::object> lists;
};

constexpr int NOBODY = -1;  // in place of the slot of a result that nobody reads

template <class Number>
void fill(Slots slots, PyObject* result, Py_ssize_t fills, const Number*& next) {
  if (!PyTuple_Check(result) && !PyList_Check(result)) return slots.set(*next++, result);
  PyObject* const* parts = PySequence_Fast_ITEMS(result);
  const Py_ssize_t count = fills == 1 ? 1 : PySequence_Fast_GET_SIZE(result);
  for (Py_ssize_t i = 0; i < count; ++i)
    if (const Number number = *next++; number != NOBODY) slots.set(number, parts[i]);
}

template <class Number>
void run(nb::list heads, int64_t calls, const Number* next, nb::list slots_list) {
  Slots slots{slots_list.ptr()};
  for (int64_t i = 0; i < calls; ++i) {
    const Head head(PyList_GET_ITEM(heads.ptr(), *next++));
    nb::object result;
    {
      const Arguments args(head, slots, next);
      result = nb::steal(PyObject_VectorcallDict(head.function, args.data(), args.size(), head.kwargs));
    }
    if (!result.is_valid()) throw nb::python_error();
    for (int64_t frees = *next++; frees > 0; --frees) slots.set(*next++, Py_None);
    if (head.fills) fill(slots, result.ptr(), head.fills, next);
  }
}

void run_tape(nb::list heads, int64_t calls, Address numbers, int itemsize, nb::list slots) {
  if (itemsize == sizeof(int16_t)) run(heads, calls, at<const int16_t>(numbers), slots);
  else run(heads, calls, at<const int32_t>(numbers), slots);
}
}  // namespace

void bind_tape(nb::module_& m) { m.def("run_tape", &run_tape); }
