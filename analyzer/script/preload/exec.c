// Preloaded into every process of a launch script (LD_PRELOAD, Linux). A program that is called by its path, by a shell or by any
// other program, is replaced by the stand-in of its name. Without this library only bash and PATH are covered.
//
// Only the stack is used for memory: the functions may run in a child of vfork, which shares the memory of its parent.

#include "common.h"
#include <spawn.h>

typedef int (*spawn_function)(pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*, char* const[],
                              char* const[]);

static spawn_function real_spawn;

// Not when it is first needed: a child of vfork must not change what the loader knows.
__attribute__((constructor)) static void find_spawn(void) { real_spawn = (spawn_function)(uintptr_t)next_function("posix_spawn"); }

static const char* base_of(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == NULL ? path : slash + 1;
}

static const char* value_in(char* const envp[], const char* name) {
  size_t length = strlen(name);
  for (size_t i = 0; envp != NULL && envp[i] != NULL; i++)
    if (strncmp(envp[i], name, length) == 0 && envp[i][length] == '=') return envp[i] + length + 1;
  return NULL;
}

// Whether a stand-in lets its own process become `path`: INFO_SCRIPT_TRIED is its process id, and paths of which this is the last.
static int is_allowed(const char* path, char* const envp[]) {
  const char* tried = value_in(envp, "INFO_SCRIPT_TRIED");
  if (tried == NULL || strtol(tried, NULL, 10) != (long)getpid()) return 0;
  const char* last = strrchr(tried, ':');
  return last != NULL && strcmp(last + 1, path) == 0;
}

static int stand_in_of(const char* name, char* target) {
  if (*name == '\0' || strcmp(name, "sh") == 0 || strcmp(name, "dash") == 0 || strcmp(name, "env") == 0) return 0;
  if (snprintf(target, PATH_MAX, "%s/bin/%s", run_folder, name) >= PATH_MAX) return 0;
  if (access(target, X_OK) == 0) return 1;
  if (strncmp(name, "python", 6) == 0 && strspn(name + 6, "0123456789.") == strlen(name + 6))
    return snprintf(target, PATH_MAX, "%s/bin/python3", run_folder) < PATH_MAX && access(target, X_OK) == 0;
  if (strncmp(name, "pip", 3) == 0 && strspn(name + 3, "0123456789.") == strlen(name + 3))
    return snprintf(target, PATH_MAX, "%s/bin/pip3", run_folder) < PATH_MAX && access(target, X_OK) == 0;
  return 0;
}

// Whether `path` is to be replaced, by the stand-in in `target`. A link to python or torchrun counts as these. The program itself
// need not exist: on another machine it may be in this place.
static int is_replaced(const char* path, char* const envp[], char* target) {
  if (run_folder[0] == '\0' || is_below(path, run_folder)) return 0;
  if (is_allowed(path, envp)) return 0;
  if (stand_in_of(base_of(path), target)) return 1;
  place found;
  int before = errno;
  if (resolve(AT_FDCWD, path, true, &found) < 0 || found.layer == MISSING) {
    errno = before;
    return 0;
  }
  const char* name = base_of(found.path);
  int launcher = strncmp(name, "python", 6) == 0 || strcmp(name, "torchrun") == 0 || strcmp(name, "deepspeed") == 0;
  return launcher && stand_in_of(name, target);
}

// The program and the option, if there is one, of the first line `#!interpreter [option]` of a script.
static bool read_interpreter(const char* path, char* interpreter, char* option) {
  char line[PATH_MAX + 256];
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  ssize_t size = read(file, line, sizeof line - 1);
  close(file);
  if (size < 4 || line[0] != '#' || line[1] != '!') return false;
  line[size] = '\0';
  line[strcspn(line, "\n")] = '\0';
  option[0] = '\0';
  for (char* end = line + strlen(line) - 1; end > line && (*end == ' ' || *end == '\t'); end--) *end = '\0';
  return sscanf(line + 2, " %4095s %255[^\n]", interpreter, option) >= 1;
}

static bool is_of_folder(const char* path) { return run_folder[0] == '\0' || is_below(path, run_folder); }

// Whether a script has python as its interpreter: its stand-in in `target`.
static bool has_python(const char* path, const char* interpreter, char* target) {
  if (strncmp(base_of(interpreter), "python", 6) != 0 || is_of_folder(path)) return false;
  return stand_in_of(base_of(interpreter), target);
}

// Where the kernel finds a program that the script has written, renamed or linked. False if it is at `path` itself, or nowhere.
static bool find_copy(const char* path, char* real) {
  place found;
  struct stat status;
  int before = errno;
  bool copied = protects && has_changes() && resolve(AT_FDCWD, path, true, &found) == 0;
  copied = copied && (found.layer == UPPER || found.layer == LOWER) && S_ISREG(found.status.st_mode);
  if (copied && KERNEL(SYS_newfstatat, AT_FDCWD, path, &status, 0) == 0)
    copied = status.st_ino != found.status.st_ino || status.st_dev != found.status.st_dev;
  if (copied) strcpy(real, found.real);
  errno = before;
  return copied;
}

// A program that was removed is still at its path for the kernel.
static bool is_removed(const char* path) {
  place found;
  int before = errno;
  bool removed = protects && has_changes() && resolve(AT_FDCWD, path, true, &found) == 0 && found.layer == MISSING;
  errno = before;
  return removed;
}

// Notes that a program is executed which is no stand-in.
static void log_program(const char* path) {
  char line[PATH_MAX + 1], target[PATH_MAX];
  if (is_of_folder(path) || !run_file(target, "programs")) return;
  int before = errno, length = snprintf(line, sizeof line, "%s\n", path);
  struct stat status;
  if (length < (int)sizeof line && access(path, X_OK) == 0 && stat(path, &status) == 0 && S_ISREG(status.st_mode)) {
    int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, target, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor >= 0) {
      KERNEL(SYS_write, descriptor, line, length);
      KERNEL(SYS_close, descriptor);
    }
  }
  errno = before;
}

static bool is_own_variable(const char* variable) {
  return strncmp(variable, "INFO_SCRIPT_FOLDER=", 19) == 0 || strncmp(variable, "INFO_SCRIPT_PRELOAD=", 20) == 0 ||
         strncmp(variable, "INFO_SCRIPT_PROTECT=", 20) == 0;
}

// The variables of the run, as they were at the start of this program.
typedef struct {
  char folder[PATH_MAX + 32], library[PATH_MAX + 32], preload[2 * PATH_MAX];
} own_variables;

#define OWN_VARIABLES 4

static size_t add_own(char** values, size_t count, char* const envp[], own_variables* own) {
  if (run_folder[0] == '\0') return count;
  snprintf(own->folder, sizeof own->folder, "INFO_SCRIPT_FOLDER=%s", run_folder);
  values[count++] = own->folder;
  if (protects) values[count++] = "INFO_SCRIPT_PROTECT=1";
  if (own_library[0] == '\0') return count;
  snprintf(own->library, sizeof own->library, "INFO_SCRIPT_PRELOAD=%s", own_library);
  values[count++] = own->library;
  const char* others = value_in(envp, "LD_PRELOAD");
  if (others != NULL && strstr(others, own_library) != NULL) return count;
  snprintf(own->preload, sizeof own->preload, "LD_PRELOAD=%s%s%s", own_library, others == NULL ? "" : ":",
           others == NULL ? "" : others);
  values[count++] = own->preload;
  return count;
}

// What is executed in the place of a program.
typedef struct {
  bool replaced;     // by a stand-in
  bool script;       // its interpreter is replaced by a stand-in
  bool copied;       // it is in the private copy
  bool interpreted;  // it is a script in the private copy, for which the kernel would not give its path to the interpreter
  char target[PATH_MAX];
  char interpreter[PATH_MAX];
  char option[256];
} plan;

static void make_plan(const char* path, char* const envp[], plan* made) {
  char copy[PATH_MAX];
  made->script = made->copied = made->interpreted = false;
  made->replaced = is_replaced(path, envp, made->target);
  if (made->replaced) return;
  bool has_line = run_folder[0] != '\0' && read_interpreter(path, made->interpreter, made->option);
  made->script = has_line && !is_allowed(path, envp) && has_python(path, made->interpreter, made->target);
  if (made->script) return;
  made->copied = find_copy(path, made->target);
  made->interpreted = made->copied && has_line && access(path, X_OK) == 0;
  if (!made->interpreted) return;
  strcpy(made->target, made->interpreter);
  if (find_copy(made->interpreter, copy)) strcpy(made->target, copy);
}

// Calls the real function with the program, arguments and environment that stand for the given ones.
static int call(pid_t* child, const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes, const char* path,
                char* const argv[], char* const envp[]) {
  char called[PATH_MAX + 32];
  plan made;
  own_variables own;
  size_t arguments = 0, variables = 0, count = 0;
  while (argv != NULL && argv[arguments] != NULL) arguments++;
  while (envp != NULL && envp[variables] != NULL) variables++;
  char *words[arguments + 4], *values[variables + OWN_VARIABLES + 2];
  make_plan(path, envp, &made);
  bool stands_in = made.replaced || made.script;
  if (!stands_in && !made.copied && is_removed(path)) return child != NULL ? ENOENT : fail(ENOENT);
  if (made.script || made.interpreted) {
    words[count++] = made.script ? made.target : made.interpreter;
    if (made.option[0] != '\0') words[count++] = made.option;
    words[count++] = (char*)path;
    for (size_t i = 1; i < arguments; i++) words[count++] = argv[i];
  } else {
    for (size_t i = 0; i < arguments; i++) words[count++] = argv[i];
    if (made.replaced && count > 0) words[0] = made.target;
  }
  words[count] = NULL;
  count = 0;
  for (size_t i = 0; i < variables; i++) {
    bool is_real = strncmp(envp[i], "INFO_SCRIPT_REAL=", 17) == 0;
    bool is_preload = strncmp(envp[i], "LD_PRELOAD=", 11) == 0 && strstr(envp[i], own_library) == NULL;
    bool is_own = run_folder[0] != '\0' && is_own_variable(envp[i]);
    if (!(stands_in && is_real) && !is_preload && !is_own) values[count++] = envp[i];
  }
  count = add_own(values, count, envp, &own);
  if (stands_in) {
    snprintf(called, sizeof called, "INFO_SCRIPT_REAL=%s", made.script ? made.interpreter : path);
    values[count++] = called;
  } else {
    log_program(path);
  }
  values[count] = NULL;
  const char* program = stands_in || made.copied ? made.target : path;
  if (child != NULL) return real_spawn(child, program, actions, attributes, words, values);
  return (int)KERNEL(SYS_execve, program, words, values);
}

// The file that PATH finds for a name without a folder.
static int find(const char* name, char* found) {
  if (strchr(name, '/') != NULL) return snprintf(found, PATH_MAX, "%s", name) < PATH_MAX;
  const char* places = getenv("PATH");
  if (places == NULL) places = "/bin:/usr/bin";
  while (1) {
    size_t length = strcspn(places, ":");
    if (snprintf(found, PATH_MAX, "%.*s/%s", length > 0 ? (int)length : 1, length > 0 ? places : ".", name) < PATH_MAX &&
        access(found, X_OK) == 0)
      return 1;
    if (places[length] == '\0') break;
    places += length + 1;
  }
  errno = ENOENT;
  return 0;
}

int execve(const char* path, char* const argv[], char* const envp[]) { return call(NULL, NULL, NULL, path, argv, envp); }

int execv(const char* path, char* const argv[]) { return call(NULL, NULL, NULL, path, argv, environ); }

int execvpe(const char* file, char* const argv[], char* const envp[]) {
  char found[PATH_MAX];
  if (!find(file, found)) return -1;
  int status = call(NULL, NULL, NULL, found, argv, envp);
  if (errno != ENOEXEC) return status;
  size_t count = 0;
  while (argv[count] != NULL) count++;
  char* words[count + 2];
  words[0] = "/bin/sh";
  words[1] = found;
  for (size_t i = 1; i <= count; i++) words[i + 1] = argv[i];
  if (count == 0) words[2] = NULL;
  return call(NULL, NULL, NULL, words[0], words, envp);
}

int execvp(const char* file, char* const argv[]) { return execvpe(file, argv, environ); }

#define COLLECT(first)                         \
  va_list rest;                                \
  size_t count = 1;                            \
  va_start(rest, first);                       \
  while (va_arg(rest, char*) != NULL) count++; \
  va_end(rest);                                \
  char* words[count + 1];                      \
  words[0] = (char*)first;                     \
  va_start(rest, first);                       \
  for (size_t i = 1; i <= count; i++) words[i] = va_arg(rest, char*);

int execl(const char* path, const char* first, ...) {
  COLLECT(first)
  va_end(rest);
  return call(NULL, NULL, NULL, path, words, environ);
}

int execlp(const char* file, const char* first, ...) {
  COLLECT(first)
  va_end(rest);
  return execvpe(file, words, environ);
}

int execle(const char* path, const char* first, ...) {
  COLLECT(first)
  char* const* envp = va_arg(rest, char* const*);
  va_end(rest);
  return call(NULL, NULL, NULL, path, words, envp);
}

int posix_spawn(pid_t* child, const char* path, const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
                char* const argv[], char* const envp[]) {
  pid_t unused;
  return call(child != NULL ? child : &unused, actions, attributes, path, argv, envp);
}

int posix_spawnp(pid_t* child, const char* file, const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
                 char* const argv[], char* const envp[]) {
  char found[PATH_MAX];
  pid_t unused;
  if (!find(file, found)) return errno;
  return call(child != NULL ? child : &unused, actions, attributes, found, argv, envp);
}

int fexecve(int descriptor, char* const argv[], char* const envp[]) {
  char path[PATH_MAX];
  if (!path_of_descriptor(descriptor, path) || path[0] != '/' || access(path, X_OK) < 0)
    return (int)KERNEL(SYS_execveat, descriptor, "", argv, envp, AT_EMPTY_PATH);
  return call(NULL, NULL, NULL, path, argv, envp);
}

// The C library starts a shell by itself in these functions. They keep the environment of this program.
static void restore_environment(void) {
  if (run_folder[0] == '\0' || own_library[0] == '\0') return;
  char preload[2 * PATH_MAX];
  const char* others = getenv("LD_PRELOAD");
  if (others == NULL || strstr(others, own_library) == NULL) {
    snprintf(preload, sizeof preload, "%s%s%s", own_library, others == NULL ? "" : ":", others == NULL ? "" : others);
    setenv("LD_PRELOAD", preload, 1);
  }
  const char* value = getenv("INFO_SCRIPT_FOLDER");
  if (value == NULL || strcmp(value, run_folder) != 0) setenv("INFO_SCRIPT_FOLDER", run_folder, 1);
  value = getenv("INFO_SCRIPT_PRELOAD");
  if (value == NULL || strcmp(value, own_library) != 0) setenv("INFO_SCRIPT_PRELOAD", own_library, 1);
  value = getenv("INFO_SCRIPT_PROTECT");
  if (protects && (value == NULL || strcmp(value, "1") != 0)) setenv("INFO_SCRIPT_PROTECT", "1", 1);
}

int system(const char* command) {
  restore_environment();
  return NEXT(system)(command);
}

FILE* popen(const char* command, const char* mode) {
  restore_environment();
  return NEXT(popen)(command, mode);
}
