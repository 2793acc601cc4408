/* MPA start-up frames, for peers that use a plain TCP socket. */
#ifndef FRAME_H
#define FRAME_H

#include <sys/socket.h>

/* The frame header (key, flags, revision, length of the private data), and the private data. */
struct frame {
	char key[16];
	unsigned char flags, revision;
	unsigned char high, low;
	char data[512];
};
#define HEADER_LEN 20

static inline int priv_data_len(const struct frame *frame)
{
	return frame->high << 8 | frame->low;
}

/* Reads a frame with its private data. Returns 0 if the whole frame arrived. Without private data
 * there is no second recv(), because it would wait for further data. */
static inline int read_frame(int s, struct frame *frame)
{
	int len;

	if (recv(s, frame, HEADER_LEN, MSG_WAITALL) != HEADER_LEN)
		return -1;
	len = priv_data_len(frame);
	if (len > (int)sizeof frame->data || (len && recv(s, frame->data, (size_t)len,
			MSG_WAITALL) != len))
		return -1;
	return 0;
}

#endif
