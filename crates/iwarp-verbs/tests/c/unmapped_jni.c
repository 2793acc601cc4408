/* Lets a Java program run `unmapped`. */
#include <jni.h>

int unmapped_main(int count, char **words);

JNIEXPORT jint JNICALL Java_Unmapped_run(JNIEnv *env, jclass class, jstring face)
{
	const char *name = (*env)->GetStringUTFChars(env, face, NULL);
	char *words[] = { "unmapped", (char *)name, "runtime", NULL };
	int code = unmapped_main(3, words);

	(void)class;
	(*env)->ReleaseStringUTFChars(env, face, name);
	return code;
}
