/* Registration of DMA-bufs. Few machines have a device that exports them, so this program replaces
 * fstatfs, which pretends that an anonymous file is one, and ioctl, which counts synchronizations.
 * The descriptor, its size and its mappings are real. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pair.h"

enum { PAGE = 4096, SIZE = 8 * PAGE, DMA_BUF_MAGIC = 0x444d4142 };

struct mr_attributes {
	size_t length;
	int access;
	uint64_t comp_mask;
	uint64_t iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah;
	void *buf;
};

struct ibv_mr *reg_mr_ex(struct ibv_pd *, struct mr_attributes *) __asm__("ibv_reg_mr_ex");

static _Atomic int lie, begun, ended, sync_error;

int fstatfs(int fd, struct statfs *to)
{
	int got = syscall(SYS_fstatfs, fd, to);

	if (got == 0 && lie)
		to->f_type = DMA_BUF_MAGIC;
	return got;
}

int fstatfs64(int fd, struct statfs64 *to)
{
	return fstatfs(fd, (struct statfs *)to);
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list arguments;
	uint64_t *flags;

	va_start(arguments, request);
	flags = va_arg(arguments, uint64_t *);
	va_end(arguments);
	if (request != 0x40086200)
		return syscall(SYS_ioctl, fd, request, flags);
	if (sync_error) {
		errno = sync_error;
		return -1;
	}
	if (*flags & 4)
		ended++;
	else
		begun++;
	return 0;
}

static int mappings(const char *name)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int n = 0;

	NEED(maps);
	while (fgets(line, sizeof(line), maps))
		n += strstr(line, name) != NULL;
	fclose(maps);
	return n;
}

static int descriptors(void)
{
	int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void refused(int fd)
{
	int pipes[2];

	NEED(pipe(pipes) == 0);
	lie = 0;
	IS_NULL(EBADF, ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, -1, PAIR_ACCESS));
	/* An ordinary file is not a DMA-buf, even if it could be mapped. */
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, pipes[0], PAIR_ACCESS));
	lie = 1;
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(NULL, 0, SIZE, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, 0, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, SIZE + 1, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, PAGE, SIZE, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, UINT64_MAX, 2, UINT64_MAX, fd, PAIR_ACCESS));
	/* The address has the offset of the buffer within a page. */
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 8, PAGE, 0, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, PAGE, 1, fd, PAIR_ACCESS));
	IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, IBV_ACCESS_REMOTE_WRITE));
	for (int bit = 4; bit < 20; bit++)
		IS_NULL(EINVAL, ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, IBV_ACCESS_LOCAL_WRITE | 1 << bit));
	/* An exporter that does not support mapping. */
	IS_NULL(EOPNOTSUPP, ibv_reg_dmabuf_mr(pd, 0, 0x100, 0, open("/proc/self/exe", O_RDONLY),
		PAIR_ACCESS));
	sync_error = ENODEV;
	IS_NULL(ENODEV, ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, PAIR_ACCESS));
	sync_error = 0;
	close(pipes[0]);
	close(pipes[1]);
}

/* A peer writes to and reads from the buffer, at an offset that is not page-aligned. */
static void used(int fd, int by_attributes)
{
	const uint64_t offset = PAGE + 40, iova = 0x123000 + 40, length = 2 * PAGE;
	int before = mappings("memfd:dmabuf"), open_before = descriptors(), at_start = begun,
		at_end = ended;
	struct ibv_mr *buffer;
	char *seen;
	struct pair p;

	NEED((seen = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) != MAP_FAILED);
	memset(seen, 0x33, SIZE);
	if (by_attributes) {
		struct mr_attributes a = { .length = length, .access = PAIR_ACCESS, .comp_mask = 1 | 4 | 8,
			.iova = iova, .fd = fd, .fd_offset = offset };

		buffer = reg_mr_ex(pd, &a);
	} else {
		buffer = ibv_reg_dmabuf_mr(pd, offset, length, iova, fd,
			PAIR_ACCESS | IBV_ACCESS_RELAXED_ORDERING);
	}
	NEED(buffer);
	CODE(at_start + 1, begun);
	CHECK((uintptr_t)buffer->addr == offset && buffer->length == length && buffer->pd == pd);
	CODE(before + 2, mappings("memfd:dmabuf"));
	create_pair(&p, IBV_QPT_RC, 0);
	to_init(p.qp[0]);
	to_init(p.qp[1]);
	connect_pair(&p);
	for (int i = 0; i < PAIR_SIZE; i++)
		memory[i] = i * 13;
	post_to(&p, IBV_WR_RDMA_WRITE, iova, buffer->rkey, length, IBV_SEND_SIGNALED);
	CODE(IBV_WC_SUCCESS, completion(p.cq[0]).status);
	CHECK(!memcmp(seen + offset, memory, length));
	CHECK(seen[offset - 1] == 0x33 && seen[offset + length] == 0x33);
	seen[offset + 5] = 0x44;
	post_to(&p, IBV_WR_RDMA_READ, iova + 5, buffer->rkey, 1, IBV_SEND_SIGNALED);
	CODE(IBV_WC_SUCCESS, completion(p.cq[0]).status);
	CODE(0x44, memory[0]);
	post_to(&p, IBV_WR_RDMA_WRITE, iova + 1, buffer->rkey, length, IBV_SEND_SIGNALED);
	CODE(IBV_WC_REM_ACCESS_ERR, completion(p.cq[0]).status);
	destroy_pair(&p);
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(buffer, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0));
	CODE(0, ibv_dereg_mr(buffer));
	CODE(at_end + 1, ended);
	munmap(seen, SIZE);
	CODE(before, mappings("memfd:dmabuf"));
	/* The first connection also opens descriptors that the library keeps. */
	if (by_attributes)
		CODE(open_before, descriptors());
}

int main(void)
{
	int fd = memfd_create("dmabuf", MFD_CLOEXEC);

	NEED(fd >= 0 && ftruncate(fd, SIZE) == 0);
	open_device();
	refused(fd);
	used(fd, 0);
	used(fd, 1);
	/* Read-only memory needs no right to write, and closing the descriptor does not end the region.
	 * */
	int again = dup(fd);
	struct ibv_mr *only = ibv_reg_dmabuf_mr(pd, 0, SIZE, 0, again, IBV_ACCESS_REMOTE_READ);

	NEED(only);
	close(again);
	CODE(0, ibv_dereg_mr(only));
	close_device();
	return result();
}
