// The function `syscall`, for programs that use it for the calls that the other files cover. Other calls go to the kernel.

#include "common.h"
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>

#pragma GCC visibility push(default)

static long file_call(long number, const long* a, bool* covered) {
  switch (number) {
    case SYS_openat:
      return openat((int)a[0], (const char*)a[1], (int)a[2], (mode_t)a[3]);
    case SYS_unlinkat:
      return unlinkat((int)a[0], (const char*)a[1], (int)a[2]);
    case SYS_mkdirat:
      return mkdirat((int)a[0], (const char*)a[1], (mode_t)a[2]);
    case SYS_mknodat:
      return mknodat((int)a[0], (const char*)a[1], (mode_t)a[2], (dev_t)a[3]);
#ifdef SYS_renameat
    case SYS_renameat:
      return renameat((int)a[0], (const char*)a[1], (int)a[2], (const char*)a[3]);
#endif
    case SYS_renameat2:
      return renameat2((int)a[0], (const char*)a[1], (int)a[2], (const char*)a[3], (unsigned)a[4]);
    case SYS_linkat:
      return linkat((int)a[0], (const char*)a[1], (int)a[2], (const char*)a[3], (int)a[4]);
    case SYS_symlinkat:
      return symlinkat((const char*)a[0], (int)a[1], (const char*)a[2]);
    case SYS_fchmodat:
      return fchmodat((int)a[0], (const char*)a[1], (mode_t)a[2], 0);
    case SYS_fchownat:
      return fchownat((int)a[0], (const char*)a[1], (uid_t)a[2], (gid_t)a[3], (int)a[4]);
    case SYS_utimensat:
      return utimensat((int)a[0], (const char*)a[1], (const struct timespec*)a[2], (int)a[3]);
    case SYS_truncate:
      return truncate((const char*)a[0], (off_t)a[1]);
    case SYS_ftruncate:
      return ftruncate((int)a[0], (off_t)a[1]);
    case SYS_chdir:
      return chdir((const char*)a[0]);
    case SYS_faccessat:
      return faccessat((int)a[0], (const char*)a[1], (int)a[2], 0);
    case SYS_faccessat2:
      return faccessat((int)a[0], (const char*)a[1], (int)a[2], (int)a[3]);
    case SYS_readlinkat:
      return readlinkat((int)a[0], (const char*)a[1], (char*)a[2], (size_t)a[3]);
    case SYS_newfstatat:
      return fstatat((int)a[0], (const char*)a[1], (struct stat*)a[2], (int)a[3]);
    case SYS_statx:
      return statx((int)a[0], (const char*)a[1], (int)a[2], (unsigned)a[3], (struct statx*)a[4]);
    case SYS_execve:
      return execve((const char*)a[0], (char* const*)a[1], (char* const*)a[2]);
#ifdef SYS_open
    case SYS_open:
      return open((const char*)a[0], (int)a[1], (mode_t)a[2]);
    case SYS_creat:
      return creat((const char*)a[0], (mode_t)a[1]);
    case SYS_unlink:
      return unlink((const char*)a[0]);
    case SYS_rmdir:
      return rmdir((const char*)a[0]);
    case SYS_mkdir:
      return mkdir((const char*)a[0], (mode_t)a[1]);
    case SYS_mknod:
      return mknod((const char*)a[0], (mode_t)a[1], (dev_t)a[2]);
    case SYS_rename:
      return rename((const char*)a[0], (const char*)a[1]);
    case SYS_link:
      return link((const char*)a[0], (const char*)a[1]);
    case SYS_symlink:
      return symlink((const char*)a[0], (const char*)a[1]);
    case SYS_chmod:
      return chmod((const char*)a[0], (mode_t)a[1]);
    case SYS_chown:
      return chown((const char*)a[0], (uid_t)a[1], (gid_t)a[2]);
    case SYS_lchown:
      return lchown((const char*)a[0], (uid_t)a[1], (gid_t)a[2]);
    case SYS_access:
      return access((const char*)a[0], (int)a[1]);
    case SYS_readlink:
      return readlink((const char*)a[0], (char*)a[1], (size_t)a[2]);
    case SYS_stat:
      return stat((const char*)a[0], (struct stat*)a[1]);
    case SYS_lstat:
      return lstat((const char*)a[0], (struct stat*)a[1]);
#endif
    default:
      *covered = false;
      return 0;
  }
}

static long other_call(long number, const long* a, bool* covered) {
  switch (number) {
    case SYS_kill:
      return kill((pid_t)a[0], (int)a[1]);
    case SYS_tkill:
      return tgkill((pid_t)a[0], (pid_t)a[0], (int)a[1]);
    case SYS_tgkill:
      return tgkill((pid_t)a[0], (pid_t)a[1], (int)a[2]);
    case SYS_rt_sigqueueinfo:
      return is_of_run((pid_t)a[0]) ? KERNEL(number, a[0], a[1], a[2]) : 0;
    case SYS_connect:
      return connect((int)a[0], (const struct sockaddr*)a[1], (socklen_t)a[2]);
    case SYS_bind:
      return bind((int)a[0], (const struct sockaddr*)a[1], (socklen_t)a[2]);
    case SYS_listen:
      return listen((int)a[0], (int)a[1]);
    case SYS_sendto:
      return sendto((int)a[0], (const void*)a[1], (size_t)a[2], (int)a[3], (const struct sockaddr*)a[4], (socklen_t)a[5]);
    case SYS_sendmsg:
      return sendmsg((int)a[0], (const struct msghdr*)a[1], (int)a[2]);
    case SYS_getsockname:
      return getsockname((int)a[0], (struct sockaddr*)a[1], (socklen_t*)a[2]);
    case SYS_getpeername:
      return getpeername((int)a[0], (struct sockaddr*)a[1], (socklen_t*)a[2]);
    case SYS_accept:
      return accept((int)a[0], (struct sockaddr*)a[1], (socklen_t*)a[2]);
    case SYS_accept4:
      return accept4((int)a[0], (struct sockaddr*)a[1], (socklen_t*)a[2], (int)a[3]);
    case SYS_recvfrom:
      return recvfrom((int)a[0], (void*)a[1], (size_t)a[2], (int)a[3], (struct sockaddr*)a[4], (socklen_t*)a[5]);
    case SYS_recvmsg:
      return recvmsg((int)a[0], (struct msghdr*)a[1], (int)a[2]);
    case SYS_mq_open:
      if ((int)a[1] & O_CREAT) return fail(EACCES);
      return KERNEL(number, a[0], a[1], a[2], a[3]);
    case SYS_mq_unlink:
      return 0;
    case SYS_reboot:
    case SYS_mount:
    case SYS_umount2:
    case SYS_pivot_root:
    case SYS_chroot:
    case SYS_swapon:
    case SYS_swapoff:
    case SYS_sethostname:
    case SYS_setdomainname:
    case SYS_settimeofday:
    case SYS_clock_settime:
    case SYS_init_module:
    case SYS_finit_module:
    case SYS_delete_module:
      return fail(EPERM);
    case 424 /* pidfd_send_signal */: {
      extern int pidfd_send_signal(int, int, siginfo_t*, unsigned);
      return pidfd_send_signal((int)a[0], (int)a[1], (siginfo_t*)a[2], (unsigned)a[3]);
    }
    case 425 /* io_uring_setup */:
    case 437 /* openat2 */:
      return fail(ENOSYS);  // programs have another way
    default:
      *covered = false;
      return 0;
  }
}

long syscall(long number, ...) {
  va_list rest;
  long a[6];
  bool covered = true;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
  va_end(rest);
  if (protects) {
    long result = file_call(number, a, &covered);
    if (covered) return result;
    covered = true;
    result = other_call(number, a, &covered);
    if (covered) return result;
  }
  return KERNEL(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
